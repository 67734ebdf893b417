"""Routing policies: which replica an arriving request goes to, as one pure function of what is known of each replica.

Equal arguments give the same replica in any process and at any time, so a recorded decision can be made again. Replicas are
known by their places in the list, which a replica that is not ready keeps. Of replicas that a policy finds equally good, the
first at or after place `sequence` modulo their number is chosen, counted cyclically: this is the one rule for ties, and it
spreads requests over idle replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a policy may know of one replica at the moment of a decision. Requests that were routed to it and that it has not
    announced yet are included.

    `hit_tokens`: leading tokens of the arriving prompt that its prefix cache holds. `waiting_tokens`: tokens of its waiting and
    running requests that are known and not computed, a decoding request's next token not included. `running`, `waiting`: its
    requests. `free_pages` of `page_count` are held by no request. `is_ready`: whether it may get requests at all.
    """

    hit_tokens: int
    waiting_tokens: int
    running: int
    waiting: int
    free_pages: int
    page_count: int
    is_ready: bool = True


class Arriving(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The request to be routed. `tokens`: the length of its prompt. `key`: the bytes that `consistent_hash` keeps together.
    `sequence` counts the router's decisions from 0. `hit_weight`: the tokens of wait that `prefix` takes for one token of a hit; 1
    in decisions that were recorded without it."""

    tokens: int
    key: bytes
    sequence: int
    hit_weight: float = 1.0


Policy = Callable[[Sequence[Candidate], Sequence[int], Arriving], int]
"""A pure function: (candidates, the places of those that are ready, in order and at least one; arriving) -> a place."""


class RoutingPolicyError(ValueError):
    """There is no routing policy of this name. The message is one sentence with the remedy."""


def work(candidate: Candidate) -> int:
    """Tokens that the replica computes before a new prompt's turn, and beside it: what it owes to prompts, and one token for
    each of its requests, all of which decode in the step that computes the new prompt."""
    return candidate.waiting_tokens + candidate.running + candidate.waiting


def prefix(candidates: Sequence[Candidate], ready: Sequence[int], arriving: Arriving) -> int:
    """The replica with the least work(replica) + hit_weight * (tokens - hit_tokens).

    A hit and a wait are paid in one currency, so no threshold decides between cache and balance. With a weight of 1 this is the
    replica that computes the fewest tokens until the first one of the answer: best for this request. A greater weight also counts
    what a miss costs those behind it: tokens that they wait for, and pages whose content they might have hit. Equal sums: the
    longer hit, then more free pages.
    """

    def cost(place: int) -> tuple[float, int, int]:
        each = candidates[place]
        return work(each) + arriving.hit_weight * (arriving.tokens - each.hit_tokens), -each.hit_tokens, -each.free_pages

    return _best(cost, ready, arriving)


def least_loaded(candidates: Sequence[Candidate], ready: Sequence[int], arriving: Arriving) -> int:
    """The replica with the least work; of equal ones that with more free pages. Hits are ignored."""
    return _best(lambda place: (work(candidates[place]), -candidates[place].free_pages), ready, arriving)


def round_robin(candidates: Sequence[Candidate], ready: Sequence[int], arriving: Arriving) -> int:
    """One after the other: all are equally good, so the rule for ties decides."""
    return _best(lambda place: (), ready, arriving)


def consistent_hash(candidates: Sequence[Candidate], ready: Sequence[int], arriving: Arriving) -> int:
    """Equal keys go to one replica (rendezvous hashing, Thaler and Ravishankar 1998): the largest hash of key and place wins, so
    a replica that leaves moves only its own keys, and gets them back when it returns."""
    return max(ready, key=lambda place: hashlib.blake2b(place.to_bytes(8, "little") + arriving.key, digest_size=8).digest())


POLICIES: dict[str, Policy] = {
    "prefix": prefix,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "consistent_hash": consistent_hash,
}
DEFAULT_POLICY = "prefix"
HIT_WEIGHT = 1.0
"""Chosen by `python -m perf.router`, which shows hits and waits for each (docs/routing.md)."""


def require_policy(name: str) -> None:
    """Raise RoutingPolicyError unless a policy has this name."""
    if name not in POLICIES:
        raise RoutingPolicyError(f"there is no routing policy {name!r}: choose {', '.join(POLICIES)}")


def route(policy: str, candidates: Sequence[Candidate], arriving: Arriving) -> int | None:
    """The place of the replica that the request goes to, None if none is ready. Raises RoutingPolicyError."""
    require_policy(policy)
    ready = [place for place, each in enumerate(candidates) if each.is_ready]
    return POLICIES[policy](candidates, ready, arriving) if ready else None


def _best(cost: Callable[[int], tuple[float, ...]], ready: Sequence[int], arriving: Arriving) -> int:
    """The ready place of the least cost, ties by the rule of this module."""
    costs = [cost(place) for place in ready]
    least = min(costs)
    equal = [place for place, each in zip(ready, costs) if each == least]
    return equal[arriving.sequence % len(equal)]
