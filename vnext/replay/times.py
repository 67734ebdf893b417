"""Times: when an event of a log happened, from the stamps beside its segments, or in steps where there are none.

Owns the choice of a clock for stat, trace and what-if. A log's events hold one kind of time only: when a request arrived, on
the wall clock of whoever numbered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vnext.replay.source import Log
from vnext.state.stamps import Stamper, Stamps, joined, parse, stamps_name
from vnext.state.state import State

STEP_US = 1000.0
"""Of a clock of steps: each one takes so long."""


def stamps_path(segment: Path) -> Path:
    """The file of a segment's stamps."""
    return segment.with_name(stamps_name(segment.name))


def stamps_of(log: Log) -> Stamps | None:
    """The stamps of all segments; None where one has none and another behind it has some.

    At the end they may be missing: the last second of an engine that was killed has no times.
    """
    found = [stamps_of_segment(path) for path in log.paths]
    while found and found[-1] is None:
        found.pop()
    if not found or any(each is None for each in found):
        return None
    stamps = joined(found)
    return stamps if len(stamps.events) else None


def stamps_of_segment(segment: Path) -> Stamps | None:
    """The stamps beside one segment, None if there are none."""
    try:
        return parse(stamps_path(segment).read_bytes())
    except OSError:
        return None


class Clock:
    """Microseconds since the log's first frame, never backwards. Mutable: ask it event by event."""

    def __init__(self, stamps: Stamps | None) -> None:
        self._ends = stamps.events.tolist() if stamps is not None else []
        self._times_us = ((stamps.times_ns - stamps.times_ns[0]) / 1000).tolist() if self._ends else []
        self._at = 0
        self.stamped = bool(self._ends)

    def of(self, event_number: int, committed: int) -> float:
        """When an event's frame was written; without stamps, so many steps after the first. Behind the last stamp, its time."""
        if not self.stamped:
            return committed * STEP_US
        return self._times_us[self._place(event_number)]

    def frame_us(self, next_event: int) -> float | None:
        """When the frame that ends before this event was written; None where that has no stamp."""
        place = self._place(next_event - 1) if self.stamped else 0
        return self._times_us[place] if self.stamped and self._ends[place] == next_event else None

    def knows(self, event_number: int) -> bool:
        """Whether an event lies before the end of the last frame that has a stamp."""
        return self.stamped and event_number < self._ends[-1]

    def _place(self, event_number: int) -> int:
        ends, at = self._ends, self._at
        while at < len(ends) - 1 and ends[at] <= event_number:
            at += 1
        self._at = at
        return at


class Carried:
    """Stamps of the logs that another log is made of, carried over frame by frame. Mutable."""

    def __init__(self, logs: Sequence[Log]) -> None:
        found = [stamps for stamps in map(stamps_of, logs) if stamps is not None]
        self._times_us: dict[int, int] = {}
        self._busy_us: dict[int, int] = {}
        for stamps in found:
            self._times_us |= zip(stamps.events.tolist(), (stamps.times_ns // 1000).tolist())
            self._busy_us |= {step: busy_ns // 1000 for step, busy_ns in stamps.busy_ns.items()}
        self._stamper = Stamper(found[0].wall_minus_monotonic_ns if found else 0)

    def frame(self, before: State, after: State) -> None:
        """A frame is carried over that led from one state to another."""
        if (now_us := self._times_us.get(after.sequence)) is None:
            return
        for step in range(before.committed, after.committed):
            if step in self._busy_us:
                self._stamper.took(step, self._busy_us[step])
        self._stamper.add(after.sequence, now_us)

    def taken(self) -> bytes:
        """What has been carried since the last time, as a file's bytes."""
        self._stamper.end_block()
        data = bytes(self._stamper.data)
        self._stamper.data.clear()
        return data
