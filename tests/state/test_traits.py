"""Traits say what events are: every field has its kind, every line reads, and who leaves is who is gone when the event is folded."""

from __future__ import annotations

import typing
from collections import Counter

import msgspec
import pytest

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import Simulation
from vnext.state.events import (
    AdapterLoaded,
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    Event,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    TierChanged,
    pack_tokens,
)
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.traits import HASH_BYTES, leaving, line_of, requests_of

EVENTS: tuple[type[Event], ...] = typing.get_args(AnyEvent)
KINDS = ("tokens", "hashes", "keyed", "private", "folders", "public")
SEEDS = range(10)
LEFT_BY = ("StepPlanned", "RequestAborted", "EngineRecovered")
ARRIVED = dict(id=7, name="a", prompt=pack_tokens([1, 2]), sampling=Sampling(seed=0, max_tokens=1), priority=0, arrival_ns=0)


def says_something(kind: object) -> bool:
    """Whether a field of this type holds bytes, a text or what a client asks for."""
    return kind in (bytes, str, Sampling) or typing.get_origin(kind) is typing.Literal


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_has_traits_of_its_own_and_each_field_of_text_has_one_kind(event: type[Event]) -> None:
    traits, fields = vars(event)["traits"], {field.name: field.type for field in msgspec.structs.fields(event)}
    kinds = Counter(field for kind in KINDS for field in getattr(traits, kind))
    assert {name for name, kind in fields.items() if says_something(kind)} <= kinds.keys() <= fields.keys()
    assert set(kinds.values()) <= {1}
    assert {*traits.shrinks} <= fields.keys() and ("transfer" in fields) == (traits.transfer in ("begins", "ends"))
    assert set(traits.requests) == {"id", "ids"} & fields.keys()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (RequestArrived(**ARRIVED), "request 7 arrives with 2 tokens"),
        (RequestArrived(**ARRIVED | {"id": 0, "priority": -2}), "request 0 arrives with 2 tokens, priority -2"),
        (
            RequestResumed(**ARRIVED, generated=pack_tokens([5])),
            "request 7 comes back with 2 tokens of its prompt and 1 of its answer",
        ),
        (StepCommitted(step=0, tokens=pack_tokens([1, 2, 3])), "step 0 gives 3 tokens"),
        (EnginePaused(mode="keep"), "paused (keep)"),
        (EnginePaused(mode=""), "resumed"),
        (AdapterLoaded(name="", digest="d0", slot=0), "adapter d0 in slot 0"),
        (AdapterLoaded(name="mine", digest="d0", slot=0), "adapter mine in slot 0"),
        (EngineRecovered(cause="rank 0 ended"), "recovery: rank 0 ended"),
        (EngineRecovered(cause="rank 0 ended", log="/logs/b"), "recovery: rank 0 ended (continues /logs/b)"),
        (TierChanged(stored=bytes(2 * HASH_BYTES)), "blocks on disk: 2 stored, 0 gone, 0 kept"),
    ],
)
def test_an_event_reads_as_a_line(event: AnyEvent, line: str) -> None:
    assert line_of(event) == line


def test_those_leave_of_whom_the_traits_say_it() -> None:
    """In runs of every kind: an event that is no commit takes exactly these rows, and its line shows none of its tokens."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        simulation = Simulation(scenario(seed, 20))
        simulation.run_and_require_all()
        started, *events = simulation.core.events
        state = start(started)
        for event in events:
            before, state = state, reduce(state, event)
            ids, still = before.rows.id.tolist(), set(state.rows.id.tolist())
            if not isinstance(event, StepCommitted):
                left = [row for row, id_ in enumerate(ids) if id_ not in still]
                assert sorted(leaving(event, ids)) == left, (seed, event)
                seen[type(event).__name__] += bool(left)
            assert line_of(event) and all(0 <= id_ < state.next_id for id_ in requests_of(event))
    assert min(seen[name] for name in LEFT_BY) > 0
