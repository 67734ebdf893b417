"""Policies: what each prefers, ties, replicas that are not ready, purity."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from vnext.routing.policies import POLICIES, Arriving, Candidate, RoutingPolicyError, route


def replica(hit_tokens: int = 0, waiting_tokens: int = 0, running: int = 0, waiting: int = 0, free_pages: int = 50, is_ready: bool = True) -> Candidate:
    return Candidate(
        hit_tokens=hit_tokens, waiting_tokens=waiting_tokens, running=running, waiting=waiting, free_pages=free_pages, page_count=50, is_ready=is_ready
    )


def prompt(sequence: int = 0, key: bytes = b"") -> Arriving:
    return Arriving(tokens=1000, key=key, sequence=sequence)


IDLE = replica()


@pytest.mark.parametrize(
    "policy, candidates, expected",
    [
        ("prefix", [IDLE, replica(hit_tokens=16), IDLE], 1),
        ("prefix", [replica(hit_tokens=800, waiting_tokens=900), IDLE], 1),  # the wait costs more than the hit saves
        ("prefix", [replica(hit_tokens=800, waiting_tokens=700), IDLE], 0),
        ("prefix", [replica(hit_tokens=800, waiting_tokens=700, running=101), IDLE], 1),  # each of them takes a token of the step
        ("prefix", [IDLE, replica(hit_tokens=800, waiting_tokens=800)], 1),  # equal sums: the hit, wherever it stands
        ("prefix", [replica(free_pages=9), replica(free_pages=10)], 1),
        ("least_loaded", [replica(waiting_tokens=3, hit_tokens=999), replica(running=1, waiting=1)], 1),
        ("least_loaded", [replica(free_pages=10), replica(free_pages=9)], 0),
    ],
)
def test_a_policy_chooses(policy: str, candidates: list[Candidate], expected: int) -> None:
    assert [route(policy, candidates, prompt(sequence)) for sequence in range(3)] == [expected] * 3


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin"])
def test_equal_replicas_take_turns(policy: str) -> None:
    candidates = [IDLE, replica(is_ready=False), IDLE, IDLE]
    assert [route(policy, candidates, prompt(sequence)) for sequence in range(6)] == [0, 2, 3, 0, 2, 3]


def test_a_weight_says_what_a_hit_is_worth() -> None:
    candidates = [replica(hit_tokens=800, waiting_tokens=1_000), IDLE]
    chosen = [route("prefix", candidates, Arriving(tokens=1000, key=b"", sequence=0, hit_weight=weight)) for weight in (0, 1, 1.25, 1.5, 9)]
    assert chosen == [1, 1, 0, 0, 0], "equal sums: the hit"


def test_only_equally_good_replicas_take_turns() -> None:
    candidates = [replica(hit_tokens=16), IDLE, replica(hit_tokens=16)]
    assert [route("prefix", candidates, prompt(sequence)) for sequence in range(4)] == [0, 2, 0, 2]


def test_a_key_stays_and_a_replica_that_leaves_moves_only_its_own() -> None:
    keys = [f"client {number}".encode() for number in range(600)]
    all_ready, one_left = [IDLE] * 4, [IDLE, IDLE, replica(is_ready=False), IDLE]
    before = {key: route("consistent_hash", all_ready, prompt(number, key)) for number, key in enumerate(keys)}
    after = {key: route("consistent_hash", one_left, prompt(number + 7, key)) for number, key in enumerate(keys)}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == 2}
    assert min(Counter(before.values()).values()) > 100 and min(Counter(after.values()).values()) > 150


@pytest.mark.parametrize("policy", POLICIES)
def test_never_a_replica_that_is_not_ready(policy: str) -> None:
    rng = random.Random(3)
    for sequence in range(300):
        candidates = [
            replica(rng.randrange(1000), rng.randrange(1000), rng.randrange(9), rng.randrange(9), rng.randrange(50), rng.random() < 0.5)
            for _ in range(rng.randrange(1, 6))
        ]
        chosen = route(policy, candidates, prompt(sequence, rng.randbytes(4)))
        assert chosen is None if not any(each.is_ready for each in candidates) else candidates[chosen].is_ready


def test_an_unknown_policy_is_one_sentence() -> None:
    with pytest.raises(RoutingPolicyError, match="there is no routing policy 'fastest': choose prefix, least_loaded"):
        route("fastest", [IDLE], prompt())
