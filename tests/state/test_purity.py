"""Purity: reduce changes nothing it was given, one past may have two futures, and no process folds differently."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from core_drive import arrival_of

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.replay.reading.show import view
from vnext.sched.schedule import schedule
from vnext.state import allocate, reduce as reducer
from vnext.state.digest import digest, parts
from vnext.state.events import AnyEvent, StepCommitted, pack_tokens
from vnext.state.pool import free_blocks
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.windows import row_blocks

SEEDS = (3, 8, 21)


@pytest.fixture(params=["roomy arenas", "tight arenas"], autouse=True)
def arenas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight ones are moved every few events, with states of before and after the move alive."""
    if request.param == "tight arenas":
        monkeypatch.setattr(reducer, "ARENA_PLACES_MIN", 8)
        monkeypatch.setattr(allocate, "TOKENS_SPARE", 1)


@cache
def simulated(seed: int, arena_places: int) -> tuple[AnyEvent, ...]:
    return simulate(scenario(seed, client_count=25)).events


def events_of(seed: int) -> tuple[AnyEvent, ...]:
    return simulated(seed, reducer.ARENA_PLACES_MIN)


def contents(state: State) -> tuple:
    """All that may be read from a state, copied by value."""
    rows = range(len(state.rows))
    return (
        view(state),
        parts(state),
        state.rows.cells.tobytes(),
        [row_tokens(state, row).tolist() for row in rows],
        [row_blocks(state, row).tolist() for row in rows],
        free_blocks(state.pool).tolist(),
        dict(state.pool.prefix_index.blocks()), state.pool.prefix_index.keys(),
        dict(state.requests.items()),
        state.waiting,
        state.token_digest,
    )


def freeze(value: object) -> None:
    """Make every array of a state read-only. Arenas are append-only by their own rules and stay as they are."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, tuple):
        for item in value:
            freeze(item)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            freeze(getattr(value, name))


@pytest.mark.parametrize("seed", SEEDS)
def test_reduce_and_schedule_leave_their_argument_as_it_was(seed: int) -> None:
    first, *rest = events_of(seed)
    state = start(first)
    for event in rest:
        freeze(state)
        before = contents(state)
        schedule(state)
        after = reduce(state, event)
        assert contents(state) == before
        state = after


@pytest.mark.parametrize("seed", SEEDS)
def test_old_states_stay_valid_for_ever(seed: int) -> None:
    first, *rest = events_of(seed)
    states = [start(first)]
    snapshots = [contents(states[0])]
    for event in rest:
        states.append(reduce(states[-1], event))
        snapshots.append(contents(states[-1]))
    assert [contents(state) for state in states] == snapshots


@pytest.mark.parametrize("seed", SEEDS)
def test_one_past_may_have_two_futures(seed: int) -> None:
    """From many old states the log is folded again, while the first future's states are still looked at."""
    first, *rest = events_of(seed)
    states = [start(first)]
    for event in rest:
        states.append(reduce(states[-1], event))
    snapshots = [contents(state) for state in states]
    for fork in range(0, len(rest), 17):
        other = states[fork]
        for place in range(fork, min(fork + 40, len(rest))):
            other = reduce(other, rest[place])
            assert contents(other) == snapshots[place + 1]
    assert [contents(state) for state in states] == snapshots


def wander(state: State, steps: int) -> State:
    """A future that the log did not take: an arrival, then steps in which everybody samples token 1."""
    state = reduce(state, arrival_of(state.next_id, [1, 2], max_tokens=3))
    for _ in range(steps):
        plan = schedule(state)
        state = reduce(state, plan) if plan is not None else state
        if state.in_flight:
            tokens = pack_tokens([1] * int(state.in_flight[0].samples.sum()))
            state = reduce(state, StepCommitted(step=state.committed, tokens=tokens))
    return state


@pytest.mark.parametrize("seed", SEEDS)
def test_two_futures_that_differ_do_not_meet(seed: int) -> None:
    """Both append to the same histories, tables and queue; each reads its own, as if the other had never been."""
    first, *rest = events_of(seed)
    states = [start(first)]
    for event in rest:
        states.append(reduce(states[-1], event))
    snapshots = [contents(state) for state in states]
    for fork in range(5, len(states), 29):
        alone = start(first)
        for event in rest[:fork]:
            alone = reduce(alone, event)
        assert contents(wander(states[fork], 6)) == contents(wander(alone, 6))
    assert [contents(state) for state in states] == snapshots


def test_unchanged_parts_are_the_same_objects() -> None:
    first, *rest = events_of(SEEDS[0])
    state = start(first)
    for event in rest:
        after = reduce(state, event)
        assert after.config is state.config
        if type(event).__name__ == "RequestArrived":
            assert after.rows is state.rows and after.pool is state.pool and after.tables is state.tables
        state = after


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_folds_twice_to_the_same_digests(seed: int) -> None:
    events = events_of(seed)
    assert digests(events) == digests(events)


def digests(events: tuple[AnyEvent, ...]) -> list[int]:
    first, *rest = events
    state = start(first)
    found = [digest(state)]
    for event in rest:
        state = reduce(state, event)
        found.append(digest(state))
    return found


CHILD = """
import sys
from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.state.digest import digest
from vnext.state.reduce import reduce, start
import xxhash
total = xxhash.xxh3_64()
for seed in (3, 8, 21):
    first, *rest = simulate(scenario(seed, client_count=25)).events
    state = start(first)
    for event in rest:
        state = reduce(state, event)
        total.update(digest(state).to_bytes(8, "little") + state.token_digest.to_bytes(8, "little"))
print(total.hexdigest(), hash("salted") % 1000)
"""


def test_processes_with_other_hash_seeds_agree(root: Path) -> None:
    """Whole simulations, decisions included, in two fresh processes."""
    found = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        ran = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
        found.append(ran.stdout.split())
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1], "the two processes were meant to hash strings differently"
