"""The event clock of an engine core: when it ticks, and how long the core may sleep."""

from __future__ import annotations

from tests.core_drive import Engine, arrival_of
from vnext.runtime.engine.clock import EventClock
from vnext.state.events import AnyEvent, ClockTicked, PinsYielded

PROMPT = list(range(1, 14))


class Now:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def arrive(engine: Engine, clock: EventClock, **fields: object) -> list[AnyEvent]:
    arrival = arrival_of(engine.state.next_id, PROMPT, max_tokens=1, **fields)
    first = clock.precede(engine.state, arrival)
    events = [arrival] if first is None else [first, arrival]
    for event in events:
        engine.fold(event)
    return events


def started(**config: object) -> tuple[Engine, EventClock, Now]:
    now = Now()
    return Engine(**{"pinned_kv_fraction": 0.5} | config), EventClock(now), now


def test_it_ticks_before_a_request_that_pins_and_when_its_pins_end():
    engine, clock, now = started()
    now.seconds += 3600
    assert arrive(engine, clock, retention=((13, 300),))[0] == ClockTicked(seconds=3600)
    now.seconds += 2
    assert arrive(engine, clock, retention=((13, 300),))[0] != ClockTicked(seconds=3602), "every ten seconds at most"
    now.seconds += 10
    assert clock.next_event(engine.state) == ClockTicked(seconds=3612), "a request that lives makes pins when it ends"
    engine.run_out()
    assert clock.next_event(engine.state) is None and clock.wait_ms(engine.state) == 288_001
    now.seconds += 288.002
    engine.fold(clock.next_event(engine.state))
    assert engine.state.clock == 3900 and clock.next_event(engine.state) is None and clock.wait_ms(engine.state) is None


def test_it_stands_still_where_nothing_depends_on_it():
    engine, clock, now = started()
    now.seconds += 3600
    assert len(arrive(engine, clock)) == 1 and clock.next_event(engine.state) is None and clock.wait_ms(engine.state) is None
    engine, clock, now = started(pinned_kv_fraction=0.0)
    now.seconds += 3600
    assert len(arrive(engine, clock, retention=((13, 300),))) == 1


def test_pins_yield_and_are_counted():
    engine, clock, _ = started(page_count=8, max_model_len=32)
    arrive(engine, clock, retention=((13, 300),))
    engine.run_out()
    engine.arrive([50] * 23, max_tokens=2)
    event = clock.next_event(engine.state)
    assert isinstance(event, PinsYielded)
    engine.fold(event)
    stats = clock.stats(engine.state)["pins"]
    assert (stats.blocks, stats.capacity, stats.pinned, stats.yielded) == (2, 4, 3, 1)
