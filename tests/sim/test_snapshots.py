"""Snapshots of the simulator, and its second spelling of policies, held against the plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.sched import ranking
from vnext.sched.policies import BUILT_IN
from vnext.sim import sample_policies
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.core import Core
from vnext.sim.order import PATIENCE, SAMPLE_ORDERS, policy_keys
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.store import extents, fields
from vnext.state.store.fields import FIELD_NAMES


def states(seeds: range) -> Iterator[State]:
    for seed in seeds:
        first, *rest = simulate(scenario(seed, client_count=25)).events
        state = start(first)
        for event in rest:
            state = reduce(state, event)
            yield state


# ---- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_made_from_the_one_before_is_a_fresh_one() -> None:
    for seed in range(340, 348):
        events = simulate(scenario(seed, client_count=25)).events
        core = Core(events[0])
        for event in events[1:]:
            core.fold(event)
            fresh = PlainState(core.state)
            assert all(value == getattr(core.seen, name) for name, value in vars(fresh).items() if name != "state")


def test_a_snapshot_by_hand() -> None:
    state = next(state for state in states(range(3, 4)) if len(state.rows) > 1 and state.in_flight and state.waiting)
    seen = PlainState(state)
    for name, column in seen.rows._asdict().items():
        assert column == state.rows.cells[FIELD_NAMES.index(name)].tolist()
    at, count = int(state.rows.cells[fields.TABLE_AT, 1]), int(state.rows.blocks[1])
    assert seen.tables[1] == extents.read(state.tables, at, count).tolist() and len(seen) == len(state.rows)
    assert seen.histories[0][: len(state.requests[seen.rows.id[0]].prompt)] == state.requests[seen.rows.id[0]].prompt
    assert seen.in_flight[-1].starts == state.in_flight[-1].starts.tolist()


# ---- policies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*BUILT_IN, "deadline:1", *sample_policies.POLICIES])
def test_policies_are_spelled_twice_and_order_alike(policy: str) -> None:
    met = Counter()
    for seed in range(350, 356):
        drawn = scenario(seed, client_count=30)
        first, *rest = simulate(replace(drawn, config=replace(drawn.config, policy=policy))).events
        state = start(first)
        for event in rest:
            state = reduce(state, event)
            ours, engines = policy_keys(PlainState(state)), ranking.keys(state)
            assert sorted(ours, key=ours.__getitem__) == sorted(engines, key=engines.__getitem__)
            met["several"] += len(ours) > 1
            met["impatient"] += any(entry.preemption_count >= PATIENCE for entry in state.waiting)
    assert met["several"] > 300


def test_every_house_policy_is_spelled_twice() -> None:
    assert set(SAMPLE_ORDERS) == {*sample_policies.POLICIES} and PATIENCE == ranking.PATIENCE
