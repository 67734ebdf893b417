"""Tallies: what a log's steps were like, counted while it is folded for its index.

Owns the counting; a tally is kept in the cache beside its segment, so that `stat` folds nothing. Values are counted as they
are and not summarised, so tallies of segments add up to the whole log's, percentiles included.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from vnext.replay.times import Clock
from vnext.state.log import Frame
from vnext.state.state import Counters, State

DIGITS = 3
"""Step times are counted in so many significant digits."""


class Tally(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How often each value occurred, over the steps of one segment.

    `tokens` computed, `requests` in the step, `queue` and `running` when it was planned, `free` blocks, `step_us` from
    one step to the next, where the frames of both have stamps. `first` and `last` are the state's counters.
    """

    tokens: dict[int, int] = {}
    requests: dict[int, int] = {}
    queue: dict[int, int] = {}
    running: dict[int, int] = {}
    free: dict[int, int] = {}
    step_us: dict[int, int] = {}
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


COUNTED = ("tokens", "requests", "queue", "running", "free", "step_us")


class Tallying:
    """The running count over one segment's frames, going on from an earlier one. `clock` is that of the segment's stamps."""

    def __init__(self, before: Tally, first: State, clock: Clock) -> None:
        self._counts = {name: Counter(getattr(before, name)) for name in COUNTED}
        self._first = before.first or numbers(first.counters)
        self._last = first
        self._clock = clock
        self._planned_us: float | None = None

    def meet(self, frame: Frame, after: State) -> None:
        """A frame was folded."""
        if after.planned > self._last.planned and after.flights:
            flight, counts = after.flights[-1], self._counts
            counts["tokens"][flight.tokens] += 1
            counts["requests"][flight.entries.shape[1]] += 1
            counts["queue"][len(after.waiting)] += 1
            counts["running"][len(after.rows)] += 1
            counts["free"][after.pool.free] += 1
        if after.planned > self._last.planned:
            self._tell_time(self._clock.frame_us(frame.first_event + len(frame.events)))
        if not after.flights:
            self._planned_us = None  # time passes at work only while a step is under way; else the engine waits
        self._last = after

    def _tell_time(self, now_us: float | None) -> None:
        """A step was planned."""
        if now_us is not None and self._planned_us is not None:
            self._counts["step_us"][rounded(now_us - self._planned_us)] += 1
        self._planned_us = now_us

    def done(self) -> Tally:
        counts = {name: dict(counter) for name, counter in self._counts.items()}
        return Tally(**counts, first=self._first, last=numbers(self._last.counters))


def numbers(counters: Counters) -> tuple[int, ...]:
    return msgspec.structs.astuple(counters)


def rounded(value: float) -> int:
    """A time in DIGITS significant digits, at least 1."""
    return max(1, int(float(f"{value:.{DIGITS}g}")))


def added(tallies: list[Tally]) -> Tally:
    """The tally of segments that follow each other."""
    counts = {name: sum((Counter(getattr(each, name)) for each in tallies), Counter()) for name in COUNTED}
    return Tally(**{name: dict(each) for name, each in counts.items()}, first=tallies[0].first, last=tallies[-1].last)


def percentiles(counts: dict[int, int], places: tuple[int, ...]) -> list[int]:
    """The values below which so many percent lie, each one that occurs; empty for no values."""
    total, found, seen = sum(counts.values()), [], 0
    ranks = [(total - 1) * place // 100 for place in places]
    for value in sorted(counts):
        seen += counts[value]
        while len(found) < len(ranks) and ranks[len(found)] < seen:
            found.append(value)
    return found
