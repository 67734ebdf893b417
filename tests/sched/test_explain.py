"""Explaining a decision: its plan is the scheduler's own, and every request that computes nothing has one reason that holds."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from core_drive import Engine, config_of
from log_drive import drawn_config, engine, small_config
from msgspec.structs import replace

from tests.sim.scenario import Scenario
from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.sched.explain import Explanation, bound_behind, explain
from vnext.sched.schedule import schedule
from vnext.state.events import EnginePaused, StepPlanned
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.store.rows import wants


def holds(state: State) -> Counter[str]:
    """The explanation is of the scheduler's plan and leaves nobody out; its reasons, counted."""
    found, plan = explain(state), schedule(state)
    assert found.plan == plan
    if len(state.in_flight) >= (1 if state.cautious else state.config.pipeline_depth):
        assert found.waits == ()
        return Counter()
    _require_everybody(state, found)
    _require_reasons(state, found)
    return Counter(wait.why for wait in found.waits)


def _require_everybody(state: State, found: Explanation) -> None:
    after = state if found.plan is None else reduce(state, found.plan)
    working = set(after.in_flight[-1].ids.tolist()) if found.plan else set()
    idle = {entry.id for entry in after.waiting} | {
        id_ for id_, want in zip(after.rows.id.tolist(), wants(after.rows).tolist()) if want > 0 and id_ not in working
    }
    reported = [wait.id for wait in found.waits]
    assert len(reported) == len(set(reported)) and set(reported) == idle


def _require_reasons(state: State, found: Explanation) -> None:
    waiting = {entry.id for entry in state.waiting}
    for wait in found.waits:
        match wait.why:
            case "order":
                assert wait.behind != wait.id and any(other.id == wait.behind for other in found.waits)
            case "room" | "preempted":
                assert wait.need > wait.have == state.pool.free and (wait.id in waiting) == (wait.why == "room")
            case "sequences":
                assert wait.have == state.config.max_num_seqs
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
    reported: Counter[str] = Counter()
    configs = (small_config(page_count=18), small_config(chunked_prefill=False, max_num_batched_tokens=44, max_num_seqs=3))
    for config in (*configs, small_config(max_num_batched_tokens=6)):
        for _, befores, _, _ in engine(config, 5, 80):
            for state in befores:
                reported += holds(state)
    assert set(reported) == {"budget", "blocks", "sequences", "order", "preempted", "room"}


def test_reasons_by_hand() -> None:
    """16 blocks of 4 tokens, 32 tokens a step, 8 requests: a takes the budget, then b lacks one block and c stands behind it."""
    play = Engine()
    a, b, c = play.arrive([1] * 33, 4), play.arrive([2] * 31, 4), play.arrive([3] * 5, 4)
    assert [(w.id, w.why) for w in explain(play.state).waits] == [(b, "budget"), (c, "budget")]
    play.step()
    assert play.running == [a] and play.waiting == [b, c]
    found = [(wait.id, wait.why, wait.need, wait.have, wait.behind) for wait in explain(play.state).waits]
    assert found == [(b, "blocks", 8, 7, -1), (c, "order", 0, 0, b)]


def test_a_cautious_state_says_so_of_those_that_it_holds_back() -> None:
    """One joins; nobody does beside its prompt; the last place in the batch is a better reason."""
    play = Engine(max_num_batched_tokens=6, max_num_seqs=2)
    a, b, c = (play.arrive([1] * 9, 20) for _ in range(3))
    play.recover(cautious=3)
    assert [(wait.id, wait.why) for wait in explain(play.state).waits] == [(b, "caution"), (c, "caution")]
    play.step()
    assert [(wait.id, wait.why) for wait in explain(play.state).waits] == [(b, "caution"), (c, "caution")]
    play.step()
    assert [(wait.id, wait.why) for wait in explain(play.state).waits] == [(c, "sequences")]
    play.plan()
    assert explain(play.state) == Explanation(None, ()) and play.state.cautious == 3


@pytest.mark.parametrize("seed", [3, 8, 13, 18, 23, 38])
def test_so_it_is_behind_recoveries(seed) -> None:
    outcome = simulate(with_caution(seed))
    state, met = start(outcome.events[0]), Counter()
    for event in outcome.events[1:]:
        if isinstance(event, StepPlanned):
            met += holds(state)
        state = reduce(state, event)
    assert met["caution"] > 0, met


def with_caution(seed: int) -> Scenario:
    drawn = scenario(seed, 24)
    config = replace(drawn.config, max_num_seqs=6, max_num_batched_tokens=max(drawn.config.max_num_batched_tokens, 6), policy="fcfs")
    return replace(drawn, config=config, faults=replace(drawn.faults, ranks_die=30, core_dies=0, deaths=20, whim=0))


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_is_compared_with_what_the_cache_does_not_have(seed):
    """Prompts that continue each other, a budget of a few tokens, and no block that is ever evicted."""
    saved = 0
    for _, befores, after, _ in engine(small_config(page_count=4000, max_num_batched_tokens=7, max_num_seqs=3), seed, 60):
        for state in (*befores, after):
            entries = {entry.id: entry for entry in state.waiting}
            for wait in explain(state).waits:
                if wait.why != "budget" or wait.id not in entries:
                    continue
                entry, names = entries[wait.id], state.pool.prefix_index.blocks()
                keys = entry.block_hashes[: (entry.known - 1) // state.config.block_size]
                hits = state.config.block_size * len(list(itertools.takewhile(names.__contains__, keys)))
                assert entry.known - wait.need >= hits  # what others of this step name already may come on top
                saved += wait.need < entry.known
    assert saved > 3


@pytest.mark.parametrize(
    ("plan", "tokens", "running", "due"),
    [
        (StepPlanned(step=0), 32, 1, "budget"),
        (StepPlanned(step=0), 31, 8, "sequences"),
        (StepPlanned(step=0), 31, 7, None),
        (StepPlanned(step=0, admitted=((0, 1),)), 32, 8, "sequences"),
        (StepPlanned(step=0, admitted=((0, 1),)), 32, 7, "budget"),
        (StepPlanned(step=0, preempted=(1,)), 32, 8, None),
        (StepPlanned(step=0, changed=((0, 1),)), 32, 8, None),
    ],
)
def test_what_bounds_the_rest_is_known_without_a_trial_only_if_nobody_gives_way(plan, tokens, running, due) -> None:
    assert bound_behind(config_of(), plan, tokens, running) == due


def test_a_pause_is_a_reason():
    engine = Engine()
    first = engine.arrive([1] * 9)
    engine.step()
    second = engine.arrive([2] * 9)
    engine.fold(EnginePaused(mode="wait"))
    told = explain(engine.state)
    assert told.plan == engine.decide() and [(wait.id, wait.why) for wait in told.waits] == [(second, "pause")]
    engine.fold(EnginePaused(mode="keep"))
    told = explain(engine.state)
    assert told.plan is None and {(wait.id, wait.why) for wait in told.waits} == {(first, "pause"), (second, "pause")}
