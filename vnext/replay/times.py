"""Times: when an event of a log happened, from the stamps beside its segments, or in steps where there are none.

Owns the choice of a clock for trace and what-if. A log's events hold one kind of time only: when a request arrived, on the
wall clock of whoever numbered it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vnext.replay.source import Log
from vnext.state.log import SEGMENT_SUFFIX
from vnext.state.stamps import STAMPS_SUFFIX, Stamps, parse

STEP_US = 1000.0
"""Of a clock of steps: each one takes so long."""


def stamps_of(log: Log) -> Stamps | None:
    """The stamps of all segments, None where any has none."""
    found = [_of_segment(path) for path in log.paths]
    if not found or any(each is None for each in found):
        return None
    events, times = (np.concatenate([getattr(each, name) for each in found]) for name in ("events", "times_ns"))
    busy = {step: took for each in found for step, took in each.busy_ns.items()}
    return Stamps(events, times, found[0].wall_minus_monotonic_ns, busy) if len(events) else None


def _of_segment(segment: Path) -> Stamps | None:
    path = segment.with_name(segment.name.removesuffix(SEGMENT_SUFFIX) + STAMPS_SUFFIX)
    try:
        return parse(path.read_bytes())
    except OSError:
        return None


class Clock:
    """Microseconds since the log's first frame, never backwards. Mutable: ask it event by event."""

    def __init__(self, stamps: Stamps | None) -> None:
        self._ends = stamps.events.tolist() if stamps is not None else []
        self._times_us = ((stamps.times_ns - stamps.times_ns[0]) / 1000).tolist() if stamps is not None else []
        self._at = 0
        self.stamped = stamps is not None

    def of(self, event_number: int, committed: int) -> float:
        """When an event's frame was written; without stamps, so many steps after the first."""
        if not self.stamped:
            return committed * STEP_US
        ends, at = self._ends, self._at
        while at < len(ends) - 1 and ends[at] <= event_number:
            at += 1
        self._at = at
        return self._times_us[at]
