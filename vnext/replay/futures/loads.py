"""Loads of LoRA adapters: how long they took in a log, and when they come in a hypothetical run; and pins that yield in it.

Which adapter is loaded, into which slot, and which one is evicted for it, is decided anew (vnext/sched/residency.py). When
a load is done follows the engine core's rules (vnext/runtime/engine/adapters.py): one adapter is read at a time, and one that
is no longer needed is dropped.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque

import msgspec

from vnext.sched.engine import Source
from vnext.sched.pinning import next_yield
from vnext.sched.residency import next_load
from vnext.state.events import AdapterEvicted, AdapterLoaded, AnyEvent
from vnext.state.facilities.adapters import held
from vnext.state.state import State

Due = tuple[AdapterEvicted | AdapterLoaded, ...]


class Loads(msgspec.Struct, frozen=True):
    """The loads of a log: each `events` entry with its time in us, and how long loads took, in us by digest."""

    events: list[tuple[float, AdapterLoaded]]
    took_us: dict[str, list[float]]

    def us(self, digest: str, number: int) -> float:
        """How long the `number`th load of an adapter takes: as in the log; behind its loads there, the median of these, or of
        all adapters' loads. 0 if no load was seen from its beginning."""
        own = self.took_us.get(digest, ())
        every = own or [each for found in self.took_us.values() for each in found] or [0.0]
        return own[number] if number < len(own) else statistics.median(every)


class LoadsSeen:
    """Collects the loads of a log while it is folded. Mutable. A load begins when the scheduler first needs it; one that
    began while another was read has no known beginning."""

    def __init__(self) -> None:
        self.loads = Loads([], {})
        self._digest, self._began_us = "", 0.0

    def hear(self, event: AnyEvent, after: State, now_us: float) -> None:
        if not after.slots or isinstance(event, AdapterEvicted):
            return
        if isinstance(event, AdapterLoaded):
            self.loads.events.append((now_us, event))
            if event.digest == self._digest and not math.isnan(self._began_us):
                self.loads.took_us.setdefault(event.digest, []).append(now_us - self._began_us)
            self._digest = ""
        wish = next_load(after)
        if self._digest and (wish is None or wish.digest != self._digest):
            self._began_us = math.nan
        elif wish is not None and not self._digest:
            self._digest, self._began_us = wish.digest, now_us


class LoadClock(Source):
    """The loading of adapters on a clock, at `now_us`. Mutable. With `recorded`, loads are done when the log's were."""

    def __init__(self, loads: Loads, recorded: bool) -> None:
        self._loads, self._recorded = loads, deque(loads.events) if recorded else None
        self._files = {event.digest: event for _, event in loads.events}
        self._digest, self._end_us = "", math.inf
        self._counts: Counter[str] = Counter()
        self._coming: list[AnyEvent] = []
        self.now_us = 0.0

    def next_event(self, state: State) -> AnyEvent | None:
        """Of a load that is done. Begins the next load."""
        if not self._coming:
            self._coming += self._due(state)
        return self._coming.pop(0) if self._coming else None

    def next_us(self) -> float:
        """When a load will be done, inf if none is known to be."""
        if self._recorded is not None:
            return self._recorded[0][0] if self._recorded else math.inf
        return self._end_us if self._digest and self._end_us > self.now_us else math.inf

    def _due(self, state: State) -> Due:
        now_us = self.now_us
        if self._recorded is not None:
            return self.decided(state, self._recorded.popleft()[1]) if self.next_us() <= now_us else ()
        if (wish := next_load(state)) is None:
            return ()
        if not self._digest or (self._digest != wish.digest and self._end_us <= now_us):
            self._digest, self._end_us = wish.digest, now_us + self._loads.us(wish.digest, self._counts[wish.digest])
            self._counts[wish.digest] += 1
        if self._digest != wish.digest or self._end_us > now_us:
            return ()
        return self.decided(state, self._files.get(wish.digest))

    def decided(self, state: State, recorded: AdapterLoaded | None) -> Due:
        """What the scheduler decides in a state where a load is done; names and paths are those of the `recorded` one."""
        wish = next_load(state)
        if wish is None:
            return ()
        if recorded is None or recorded.digest != wish.digest:
            return wish.events("")
        return wish.events(recorded.name, recorded.path)


class LoadsAtOnce(Source):
    """The loading of adapters where it takes no time."""

    goes_out = True

    def __init__(self) -> None:
        self._coming: list[AnyEvent] = []

    def next_event(self, state: State) -> AnyEvent | None:
        """Of the load that a waiting request needs."""
        if not self._coming and (wish := next_load(state)) is not None:
            self._coming += wish.events("")
        return self._coming.pop(0) if self._coming else None


class Yields(Source):
    """Pins that yield, where a log has no clock that ticks."""

    goes_out = True

    def next_event(self, state: State) -> AnyEvent | None:
        """The pins that yield now."""
        return next_yield(state)


def resident(state: State, slots: int) -> tuple[AdapterLoaded, ...]:
    """The loads that put a state's adapters into as many slots, each into its own if all fit; else those of running
    requests go first, then those used last."""
    filled = [(place, slot) for place, slot in enumerate(state.slots) if slot is not None]
    if len(state.slots) > slots:
        in_use = held(state)
        best = sorted(filled, key=lambda each: (each[1].digest not in in_use, -each[1].used))[:slots]
        filled = list(enumerate(slot for _, slot in best))
    return tuple(AdapterLoaded(name=slot.name, digest=slot.digest, slot=place) for place, slot in filled)
