"""The walk: a million events of seeded scenarios, every law after every event, every stream against its oracle.

A part a test, so that parts share the machine's cores with the other tests (see tests/conftest.py). A seed that fails is in
the message, with the smallest events that fail in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from walking import FIRST_SEED, PARTS, WALKED, walk_part

from tests.sim.seeds import Form, run_seed
from vnext.sim import core
from vnext.sim.checks.plain_state import PlainState
from vnext.state import allocate, reduce as reducer
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent
from vnext.state.store import columns, columns_numpy

PART_S_MAX = 1200
EVENTS_TO_MEET_ALL = 5_000


@pytest.mark.timeout(PART_S_MAX)
@pytest.mark.parametrize("part", range(PARTS))
def test_walk(part: int, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> None:
    events_each = -(-pytestconfig.getoption("--walk-events") // PARTS)
    walked = walk_part(part, events_each)
    record_property(WALKED, msgspec.to_builtins(walked))
    assert not walked.failure, walked.failure
    assert walked.events >= events_each and walked.first_seed == FIRST_SEED * (part + 1)
    assert walked.next_seed <= FIRST_SEED * (part + 2), "the next part walks these seeds"
    if walked.events >= EVENTS_TO_MEET_ALL:
        assert all(walked.met.values()), f"the scenarios met too little: {walked.met}"


def test_every_form_of_the_engine_is_walked() -> None:
    """Large and small arenas, the columns as they are here and their plain form: the seed says which."""
    seen = set()
    for seed in range(FIRST_SEED, FIRST_SEED + 8):
        with Form(seed):
            seen.add((reducer.ARENA_PLACES_MIN, allocate.TOKENS_SPARE, columns.impl is columns_numpy))
    compiled = columns._columns is not None
    assert seen == {(places, spare, plain) for places, spare in ((4096, 256), (8, 1)) for plain in ({True, not compiled})}
    assert reducer.ARENA_PLACES_MIN == 4096


def nobody_finishes(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    if after.state.counters.finished:
        raise LawBroken("M9", "somebody has finished")


def test_a_seed_that_fails_ends_its_part_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed, law and the smallest events; here of a law that no engine keeps."""
    monkeypatch.setattr(core, "event_laws", nobody_finishes)
    walked = walk_part(0, 500)
    assert walked.next_seed == FIRST_SEED + 1 and walked.events == 0
    assert f"run_seed({FIRST_SEED}, 60) fails with LawBroken: law M9 broken: somebody has finished" in walked.failure
    assert "the smallest failing events are 4:" in walked.failure and "request 0 arrives: prompt" in walked.failure


def test_a_part_is_its_seeds_in_order() -> None:
    """Its seeds and events follow from its number and their count alone."""
    walked = walk_part(5, 500)
    events, seed = 0, FIRST_SEED * 6
    while events < 500:
        events += len(run_seed(seed).events) - 1
        seed += 1
    assert (walked.events, walked.next_seed, walked.failure) == (events, seed, "")
