"""Clients: the law of turns holds in stories with several clients and weights, and other orders break it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from core_drive import Engine, arrival_of

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.sched.schedule import schedule
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.checks.run_laws import ClientBook
from vnext.state.errors import LawBroken
from vnext.state.events import StepCommitted, pack_tokens
from vnext.state.reduce import reduce

replace = msgspec.structs.replace


@pytest.mark.parametrize("seed", range(200, 224))
def test_a_flood_of_one_client_breaks_no_law_of_the_others(seed: int) -> None:
    """Two thirds of the requests are one client's and come at once, few fit into the batch, and all else is as drawn."""
    drawn = scenario(seed, client_count=45)
    clients = tuple(
        replace(each, cache_salt="flood", arrival_us=0) if place % 3 else replace(each, cache_salt=str(place % 4))
        for place, each in enumerate(sorted(drawn.clients, key=lambda each: each.arrival_us))
    )
    clients = tuple(sorted(clients, key=lambda each: each.arrival_us))
    config = replace(drawn.config, policy="fair", counts_alone=seed % 3 == 0, max_num_seqs=min(drawn.config.max_num_seqs, 3))
    outcome = simulate(replace(drawn, config=config, clients=clients))
    assert outcome.state.requests.mapping() == {}


@pytest.mark.parametrize(("policy", "holds"), [("fair", True), ("fcfs", False)])
def test_the_bound_on_who_falls_behind_is_broken_by_first_come_first_served(policy: str, holds: bool) -> None:
    engine, book = Engine(policy=policy, max_num_seqs=2), ClientBook()
    fold = engine.fold

    def judged(event):
        before = PlainState(engine.state)
        fold(event)
        book.note(event)
        book.count(before, after := PlainState(engine.state))
        book.falls_behind(before, event, after)

    engine.fold = judged

    def story():
        for _ in range(80):
            engine.arrive([1] * 6, max_tokens=4, client=1)
        engine.arrive([2] * 6, max_tokens=4, client=2)
        while engine.state.requests:
            engine.step()

    if holds:
        return story()
    with pytest.raises(LawBroken, match="F1"):
        story()


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 3, 15), (12, 60, 96)])
def test_shares_are_as_the_weights_while_all_wait(weights: tuple[int, ...]) -> None:
    """Clients whose requests are of other lengths. Once each has had its first turns, shares are within 5 % of the weights'."""
    state, count = Engine(policy="fair", max_num_seqs=2, prefix_caching=False).state, len(weights)
    for number in range(300 * count):
        client, more = number % count, {"client": number % count, "weight": weights[number % count]}
        state = reduce(state, arrival_of(number, [1] * (3 + 4 * client), max_tokens=1 + number // count % 3, **more))
    got = Counter[int]()
    while {entry.id % count for entry in state.waiting} == set(range(count)):
        state = reduce(state, schedule(state))
        step = state.in_flight[0]
        if state.committed >= 60:
            got += Counter(id_ % count for id_, each in zip(step.ids.tolist(), step.counts.tolist()) for _ in range(each))
        state = reduce(state, StepCommitted(step=step.step, tokens=pack_tokens([9] * int(step.samples.sum()))))
    shares = [got[client] / got.total() * sum(weights) / weights[client] for client in range(count)]
    assert got.total() > 800 and all(abs(share - 1) < 0.05 for share in shares), (got, shares)


def test_a_weight_is_the_requests_own() -> None:
    """What comes after a change of weights has the new one, what came before keeps its own."""
    engine = Engine(policy="fair", max_num_seqs=1, prefix_caching=False)
    for _ in range(9):
        engine.arrive([1] * 4, max_tokens=1, client=1)
        engine.arrive([2] * 4, max_tokens=1, client=2, weight=4)
    for _ in range(9):
        engine.arrive([1] * 4, max_tokens=1, client=1)
        engine.arrive([2] * 4, max_tokens=1, client=2)
    order = [id_ for _ in range(36) for id_ in engine.step()]
    clients = ["l" if id_ % 2 == 0 else "H" if id_ < 18 else "h" for id_ in order]
    assert "".join(clients[:12]) == "lHHHHlHHHHlH" and "HH" not in "".join(clients[12:]).replace("l", "")


def test_a_client_that_was_idle_has_no_credit_whatever_its_weight() -> None:
    engine = Engine(policy="fair", max_num_seqs=1, prefix_caching=False)
    engine.arrive([2] * 4, max_tokens=1, client=2, weight=100)
    for _ in range(40):
        engine.arrive([1] * 4, max_tokens=1, client=1)
    for _ in range(21):
        engine.step()
    for _ in range(20):
        engine.arrive([2] * 4, max_tokens=1, client=2)
    late = "".join("l" if id_ <= 40 else "h" for _ in range(20) for id_ in engine.step())
    assert late in ("lh" * 10, "hl" * 10), late
