"""The event clock, as the engine core runs it: whole seconds since the engine started, ticked where the state depends on time.

Read from the monotonic clock, so it never goes back, whatever is done to the machine's time. When it ticks is decided by
vnext/sched/pinning.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vnext.runtime.engine.facility import Facility
from vnext.runtime.protocol.stats import PinStats
from vnext.sched.pinning import next_tick, next_yield, tick_due_s
from vnext.state.events import AnyEvent, ClockTicked, PinsYielded, RequestArrived
from vnext.state.state import State


class EventClock(Facility):
    """Knows which live requests make pins when they end. It is on while one of them lives or a page is pinned."""

    precedes = True
    is_on = False

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._began_s = now_s, now_s()
        self._retaining: set[int] = set()

    def precede(self, state: State, event: AnyEvent) -> ClockTicked | None:
        """A tick, before a request that makes pins where the clock has stood still."""
        if not (isinstance(event, RequestArrived) and event.sampling.retention and state.config.pinned_pages_max):
            return None
        self._retaining.add(event.id)
        self.is_on = True
        return next_tick(state, self._seconds(), True)

    def next_event(self, state: State) -> ClockTicked | PinsYielded | None:
        """The tick that is due now, or the end of pins without which nobody could go on; None while there is neither."""
        self._retaining = {id_ for id_ in self._retaining if id_ in state.requests}
        self.is_on = bool(self._retaining) or state.pool.pins is not None
        return next_tick(state, self._seconds(), bool(self._retaining)) or next_yield(state)

    def stats(self, state: State) -> dict[str, object]:
        most, pins = state.config.pinned_pages_max, state.pool.pins
        counts = {name: getattr(pins, name, 0) for name in ("pinned", "expired", "displaced", "yielded", "dropped")}
        return {"pins": PinStats(blocks=pins.count if pins else 0, capacity=most, **counts)}

    def wait_ms(self, state: State) -> int | None:
        """How long until the next tick is due; None if none ever is."""
        due_s = tick_due_s(state, bool(self._retaining))
        return None if due_s is None else max(0, int(1000 * (self._began_s + due_s - self._now_s())) + 1)

    def _seconds(self) -> int:
        return int(self._now_s() - self._began_s)
