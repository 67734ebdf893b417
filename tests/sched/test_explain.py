"""Explaining a decision: its plan is the scheduler's own, and every request that computes nothing has one reason that holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from core_drive import Engine
from log_drive import drawn_config, engine, small_config

from vnext.sched.explain import Explanation, explain
from vnext.sched.schedule import schedule
from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.simulator import simulate
from vnext.state.events import StepPlanned
from vnext.state.reduce import reduce, start
from vnext.state.rows import wants
from vnext.state.state import State


def holds(state: State) -> Counter[str]:
    """The explanation is of the scheduler's plan and leaves nobody out; its reasons, counted."""
    found, plan = explain(state), schedule(state)
    assert found.plan == plan
    if len(state.flights) >= state.config.pipeline_depth:
        assert found.waits == ()
        return Counter()
    _require_everybody(state, found)
    _require_reasons(state, found)
    return Counter(wait.why for wait in found.waits)


def _require_everybody(state: State, found: Explanation) -> None:
    after = state if found.plan is None else reduce(state, found.plan)
    working = set(after.flights[-1].ids.tolist()) if found.plan else set()
    idle = {entry.id for entry in after.waiting} | {
        id_ for id_, want in zip(after.rows.id.tolist(), wants(after.rows).tolist()) if want > 0 and id_ not in working
    }
    told = [wait.id for wait in found.waits]
    assert len(told) == len(set(told)) and set(told) == idle


def _require_reasons(state: State, found: Explanation) -> None:
    waiting = {entry.id for entry in state.waiting}
    for wait in found.waits:
        match wait.why:
            case "order":
                assert wait.behind != wait.id and any(other.id == wait.behind for other in found.waits)
            case "room" | "preempted":
                assert wait.need > wait.have == state.pool.free and (wait.id in waiting) == (wait.why == "room")
            case "sequences":
                assert wait.have == state.config.running_max
            case _:
                assert wait.need > wait.have >= 0


@pytest.mark.parametrize("seed", range(24))
def test_the_plan_is_the_schedulers_and_nobody_is_left_out(seed):
    """Any small engine, every state in which it decides."""
    decided = 0
    for _, befores, after, _ in engine(drawn_config(random.Random(seed)), seed, 40):
        for state in (*befores, after):
            holds(state)
            decided += schedule(state) is not None
    assert decided > 20


@pytest.mark.parametrize("seed", range(16))
def test_so_it_is_in_the_simulators_scenarios(seed):
    outcome = simulate(scenario(seed, 24))
    state = start(outcome.events[0])
    for event in outcome.events[1:]:
        if isinstance(event, StepPlanned):
            holds(state)
        state = reduce(state, event)


def test_every_reason_occurs() -> None:
    told: Counter[str] = Counter()
    configs = (small_config(block_count=18), small_config(chunked_prefill=False, batch_tokens_max=44, running_max=3))
    for config in (*configs, small_config(batch_tokens_max=6)):
        for _, befores, _, _ in engine(config, 5, 80):
            for state in befores:
                told += holds(state)
    assert set(told) == {"budget", "blocks", "sequences", "order", "preempted", "room"}


def test_reasons_by_hand() -> None:
    """16 blocks of 4 tokens, 32 tokens a step, 8 requests: a takes the budget, then b lacks one block and c stands behind it."""
    play = Engine()
    a, b, c = play.arrive([1] * 33, 4), play.arrive([2] * 31, 4), play.arrive([3] * 5, 4)
    assert [(w.id, w.why) for w in explain(play.state).waits] == [(b, "budget"), (c, "budget")]
    play.step()
    assert play.running == [a] and play.waiting == [b, c]
    found = [(wait.id, wait.why, wait.need, wait.have, wait.behind) for wait in explain(play.state).waits]
    assert found == [(b, "blocks", 8, 7, -1), (c, "order", 0, 0, b)]
