"""Clients: the law of turns holds in stories with several clients, and other orders break it."""

from __future__ import annotations

import msgspec
import pytest
from core_drive import Engine

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.checks.run_laws import ClientBook
from vnext.state.errors import LawBroken

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
