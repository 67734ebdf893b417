"""Times: when an event of a log happened, by the timestamps beside its segments, or in steps where there are none.

Owns the choice of a clock for stat, trace and what-if. A log's events hold only one kind of time: a request's arrival,
on the wall clock of the process that numbered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vnext.log.timestamps import TimestampEncoder, Timestamps, ascending, joined, parse, timestamps_name
from vnext.replay.reading.source import Log
from vnext.state.state import State

STEP_US = 1000.0
"""On a clock of steps, each step takes this long."""


def timestamps_path(segment: Path) -> Path:
    """The file of a segment's timestamps."""
    return segment.with_name(timestamps_name(segment.name))


def timestamps_of(log: Log) -> Timestamps | None:
    """The timestamps of all segments, or None if there are none. Some may be missing: an engine that was killed leaves
    its last second without times, and a lost file leaves a hole. Timestamps of a segment that go backwards are
    dropped, along with all after them.
    """
    found = [timestamps for path in log.paths if (timestamps := timestamps_of_segment(path)) is not None]
    timestamps = joined(ascending(found)) if found else None
    return timestamps if timestamps is not None and len(timestamps.events) else None


def timestamps_of_segment(segment: Path) -> Timestamps | None:
    """The timestamps beside one segment; None if there are none."""
    try:
        return parse(timestamps_path(segment).read_bytes())
    except OSError:
        return None


def timestamps_size(segment: Path) -> int:
    """The size in bytes of a segment's timestamps, 0 if there are none."""
    try:
        return timestamps_path(segment).stat().st_size
    except OSError:
        return 0


class Clock:
    """Microseconds since the log's first frame, or since the machine's start (`absolute`); never backwards. Mutable:
    ask about events in order."""

    def __init__(self, timestamps: Timestamps | None, absolute: bool = False) -> None:
        self._ends_array = timestamps.events if timestamps is not None else np.empty(0, np.int64)
        self._ends = self._ends_array.tolist()
        times_ns = timestamps.times_ns if timestamps is not None else np.empty(0, np.int64)
        since_ns = 0 if absolute or not self._ends else int(times_ns[0])
        # notes are kept: open timestamps (ns) must give the values that they will give as a block (us)
        self._times_array_us = (times_ns // 1000).astype(np.float64) if absolute else (times_ns - since_ns) / 1000
        self._times_us = self._times_array_us.tolist()
        self._at = 0
        self.timestamped = bool(self._ends)

    def known_us(self, frame_end: int, committed: int) -> float | None:
        """When the frame that ends before this event was written; None if no timestamp says so. Without timestamps, the
        time of as many steps after the first."""
        return self.frame_us(frame_end) if self.timestamped else committed * STEP_US

    def known_many(self, frame_ends: np.ndarray, committed: np.ndarray) -> list[float | None]:
        """As `known_us`, for many frames (int64[n] both)."""
        if not self.timestamped:
            return [each * STEP_US for each in committed.tolist()]
        return [None if np.isnan(each) else each for each in self.frames_us(frame_ends).tolist()]

    def frame_us(self, next_event: int) -> float | None:
        """When the frame that ends before this event was written; None if it has no timestamp."""
        place = self._place(next_event - 1) if self.timestamped else 0
        return self._times_us[place] if self.timestamped and self._ends[place] == next_event else None

    def frames_us(self, next_events: np.ndarray) -> np.ndarray:
        """As `frame_us`, for many frames (float64[n]); nan where there is no timestamp."""
        if not self.timestamped:
            return np.full(len(next_events), np.nan)
        ends = self._ends_array
        places = np.minimum(np.searchsorted(ends, next_events), len(ends) - 1)
        return np.where(ends[places] == next_events, self._times_array_us[places], np.nan)

    @property
    def last_event(self) -> int:
        """The event after the last frame that has a timestamp; 0 without timestamps."""
        return self._ends[-1] if self.timestamped else 0

    def _place(self, event_number: int) -> int:
        ends, at = self._ends, self._at
        while at < len(ends) - 1 and ends[at] <= event_number:
            at += 1
        self._at = at
        return at


class Carried:
    """Copies the timestamps of source logs to a log made of them, frame by frame. Mutable."""

    def __init__(self, logs: Sequence[Log]) -> None:
        found = [timestamps for timestamps in map(timestamps_of, logs) if timestamps is not None]
        self._times_us: dict[int, int] = {}
        self._busy_us: dict[int, int] = {}
        for timestamps in found:
            self._times_us |= zip(timestamps.events.tolist(), (timestamps.times_ns // 1000).tolist())
            self._busy_us |= {step: busy_ns // 1000 for step, busy_ns in timestamps.busy_ns.items()}
        self._timestamp_encoder = TimestampEncoder(found[0].wall_minus_monotonic_ns if found else 0)

    def frame(self, before: State, after: State) -> None:
        """Copy the timestamp of the frame that led from one state to another."""
        if (now_us := self._times_us.get(after.sequence)) is None:
            return
        for step in range(before.committed, after.committed):
            if step in self._busy_us:
                self._timestamp_encoder.took(step, self._busy_us[step])
        self._timestamp_encoder.add(after.sequence, now_us)

    def taken(self) -> bytes:
        """The timestamps copied since the last call, as a file's bytes."""
        self._timestamp_encoder.end_block()
        data = bytes(self._timestamp_encoder.data)
        self._timestamp_encoder.data.clear()
        return data
