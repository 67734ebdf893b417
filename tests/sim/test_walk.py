"""The walk: a million events of seeded scenarios, every law after every event, every stream against its oracle.

It walks in a process of its own from the first test on (tests/walking.py, the fixture `walk`); these tests run last and
wait for what it found. A seed that fails is in the message, with the smallest events that fail in the same way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vnext.sched.sim import core
from vnext.sched.sim.seeds import Form, run_seed
from vnext.sched.sim.snapshot import Snapshot
from vnext.state import admitting, columns, columns_numpy, reduce as reducer
from vnext.state.errors import LawBroken
from walking import FIRST_SEED, PARTS, Walk, walk_part

WAIT_S_MAX = 1800
EVENTS_TO_MEET_ALL = 5_000


@pytest.mark.walk
@pytest.mark.timeout(WAIT_S_MAX)
@pytest.mark.parametrize("part", range(PARTS))
def test_walk(part: int, walk: Walk) -> None:
    walked = walk.result(part)
    assert not walked.failure, walked.failure
    assert walked.events >= walk.events_each and walked.first_seed == FIRST_SEED * (part + 1)
    assert walked.next_seed <= FIRST_SEED * (part + 2), "the next part walks these seeds"
    if walked.events >= EVENTS_TO_MEET_ALL:
        assert all(walked.met.values()), f"the scenarios met too little: {walked.met}"


def test_every_form_of_the_engine_is_walked() -> None:
    """Large and small arenas, the columns as they are here and their plain form: the seed says which."""
    seen = set()
    for seed in range(FIRST_SEED, FIRST_SEED + 8):
        with Form(seed):
            seen.add((reducer.ARENA_PLACES_MIN, admitting.TOKENS_SPARE, columns.kernels is columns_numpy))
    compiled = columns._columns is not None
    assert seen == {(places, spare, plain) for places, spare in ((4096, 256), (8, 1)) for plain in ({True, not compiled})}
    assert reducer.ARENA_PLACES_MIN == 4096


def nobody_finishes(before: Snapshot, after: Snapshot) -> None:
    if after.state.counters.finished:
        raise LawBroken("M9", "somebody has finished")


def test_a_seed_that_fails_ends_its_part_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed, law and the smallest events; here of a law that no engine keeps."""
    monkeypatch.setattr(core, "check_after", nobody_finishes)
    walked = walk_part(0, 500, os.getppid())
    assert walked.next_seed == FIRST_SEED + 1 and walked.events == 0
    assert f"run_seed({FIRST_SEED}, 60) fails with LawBroken: law M9 broken: somebody has finished" in walked.failure
    assert "the smallest failing events are 4:" in walked.failure and "request 0 arrives: prompt" in walked.failure


def test_a_part_is_the_same_whoever_walks_it(tmp_path: Path) -> None:
    """Its seeds and events follow from its number and their count alone."""
    walk = Walk([5], 4_000, tmp_path)
    walked = walk.result(5)
    events, seed = 0, FIRST_SEED * 6
    while events < 500:
        events += len(run_seed(seed).events) - 1
        seed += 1
    assert (walked.events, walked.next_seed, walked.failure) == (events, seed, "")
    walk.stop()


def test_a_walk_that_breaks_down_is_no_result(tmp_path: Path) -> None:
    walk = Walk([0], 10**9, tmp_path)
    walk.stop()
    with pytest.raises(AssertionError, match="the walk ended without a result for part 0"):
        walk.result(0)
