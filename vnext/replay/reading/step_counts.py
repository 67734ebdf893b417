"""Step counts: what a log's steps were like, counted while the log is folded for its index.

Owns the counting. The counts live in the cache beside the segment, so `stat` folds nothing. Values are counted and not
summarised, so the counts of segments add up to the whole log's, percentiles included.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vnext.log.codec import Frame
from vnext.replay.reading.times import Clock
from vnext.state.state import Counters, State

if TYPE_CHECKING:
    from vnext.replay.reading.strides import Run

DIGITS = 3
"""Step times are counted with this many significant digits."""


class StepCounts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How often each value occurred, over the steps of one segment.

    `tokens` are computed tokens and `requests` those in the step; `queue`, `running` and `free` (blocks) are as of
    planning. `step_us` is the time from one step to the next, where the frames of both have timestamps. `first` and
    `last` are the state's counters; `planned_us` is when the last step was planned, if one is in flight.
    """

    tokens: dict[int, int] = {}
    requests: dict[int, int] = {}
    queue: dict[int, int] = {}
    running: dict[int, int] = {}
    free: dict[int, int] = {}
    step_us: dict[int, int] = {}
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    planned_us: float | None = None


COUNTED = ("tokens", "requests", "queue", "running", "free", "step_us")


class StepCounter:
    """Counts over one segment's frames, optionally continuing earlier counts. `clock` is that of the segment's
    timestamps."""

    def __init__(self, before: StepCounts, first: State, clock: Clock) -> None:
        self._counts = {name: Counter(getattr(before, name)) for name in COUNTED}
        self._arrays: dict[str, list[np.ndarray]] = {name: [] for name in COUNTED}
        self._first = before.first or numbers(first.counters)
        self._planned, self._counters = first.planned, first.counters
        self._clock = clock
        self._planned_us: float | None = before.planned_us

    def meet(self, frame: Frame, after: State) -> None:
        if after.planned > self._planned and after.in_flight:
            scheduled, counts = after.in_flight[-1], self._counts
            counts["tokens"][scheduled.tokens] += 1
            counts["requests"][scheduled.entries.shape[1]] += 1
            counts["queue"][len(after.waiting)] += 1
            counts["running"][len(after.rows)] += 1
            counts["free"][after.pool.free] += 1
        if after.planned > self._planned:
            self._tell_time(self._clock.frame_us(frame.first_event + len(frame.events)))
        if not after.in_flight:
            self._planned_us = None  # time counts only while a step is in flight; otherwise the engine waits
        self._planned, self._counters = after.planned, after.counters

    def meet_run(self, run: Run) -> None:
        """Take a folded run of steady frames."""
        arrays, after = self._arrays, run.after
        for name, column in (("requests", 0), ("tokens", 1), ("free", 2)):
            arrays[name].append(run.plans[:, column])
        self._counts["queue"][len(after.waiting)] += run.frames
        self._counts["running"][len(after.rows)] += run.frames
        before_us = np.nan if self._planned_us is None else self._planned_us
        times_us = np.concatenate([[before_us], self._clock.frames_us(run.next_events)])
        passed_us = np.diff(times_us)
        arrays["step_us"].append(passed_us[~np.isnan(passed_us)].astype(np.int64))
        self._planned_us = None if np.isnan(times_us[-1]) else float(times_us[-1])
        self._planned, self._counters = after.planned, after.counters

    def _tell_time(self, now_us: float | None) -> None:
        """Note the time at which a step was planned."""
        if now_us is not None and self._planned_us is not None:
            self._counts["step_us"][rounded(now_us - self._planned_us)] += 1
        self._planned_us = now_us

    def done(self) -> StepCounts:
        """The counts so far. Counting may continue."""
        for name, arrays in self._arrays.items():
            values, times = np.unique(np.concatenate([np.empty(0, np.int64), *arrays]), return_counts=True)
            for value, count in zip(values.tolist(), times.tolist()):
                self._counts[name][rounded(value) if name == "step_us" else value] += count
            arrays.clear()
        counts = {name: dict(sorted(counter.items())) for name, counter in self._counts.items()}
        return StepCounts(**counts, first=self._first, last=numbers(self._counters), planned_us=self._planned_us)


def numbers(counters: Counters) -> tuple[int, ...]:
    return msgspec.structs.astuple(counters)


def rounded(value: float) -> int:
    """A time rounded to DIGITS significant digits, at least 1."""
    return max(1, int(float(f"{value:.{DIGITS}g}")))


def added(parts: list[StepCounts]) -> StepCounts:
    """The step counts of consecutive segments, added."""

    def of(name: str) -> dict[int, int]:
        return dict(sum((Counter(getattr(each, name)) for each in parts), Counter[int]()))

    return StepCounts(
        tokens=of("tokens"), requests=of("requests"), queue=of("queue"), running=of("running"), free=of("free"),
        step_us=of("step_us"), first=parts[0].first, last=parts[-1].last,
    )  # fmt: skip


def percentiles(counts: dict[int, int], places: tuple[int, ...]) -> list[int]:
    """The values below which the given percentages lie, each an observed one; empty for no values."""
    found: list[int] = []
    total, seen = sum(counts.values()), 0
    ranks = [(total - 1) * place // 100 for place in places]
    for value in sorted(counts):
        seen += counts[value]
        while len(found) < len(ranks) and ranks[len(found)] < seen:
            found.append(value)
    return found
