"""Tallies: what a log's steps were like, counted while it is folded for its index.

Owns the counting; a tally is kept in the cache beside its segment, so that `stat` folds nothing. Values are counted as they
are and not summarised, so tallies of segments add up to the whole log's, percentiles included.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from vnext.state.log import Frame
from vnext.state.state import Counters, State

DIGITS = 3
"""Step times are counted in so many significant digits."""


class Tally(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How often each value occurred, over the steps of one segment.

    `tokens` computed, `requests` in the step, `queue` and `running` when it was planned, `free` blocks, `step_us` from
    one step to the next: the mean between two frames that tell the time. `first` and `last` are the state's counters.
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
    """The running count over one segment's frames, going on from an earlier one."""

    def __init__(self, before: Tally, first: State) -> None:
        self._counts = {name: Counter(getattr(before, name)) for name in COUNTED}
        self._first = before.first or numbers(first.counters)
        self._last = first
        self._clock_us = self._clock_step = 0

    def meet(self, frame: Frame, after: State) -> None:
        """A frame was folded."""
        if after.planned > self._last.planned and after.flights:
            flight, counts = after.flights[-1], self._counts
            counts["tokens"][flight.tokens] += 1
            counts["requests"][flight.entries.shape[1]] += 1
            counts["queue"][len(after.waiting)] += 1
            counts["running"][len(after.rows)] += 1
            counts["free"][after.pool.free] += 1
        if frame.clock_us:
            self._tell_time(frame.clock_us, after)
        self._last = after

    def _tell_time(self, clock_us: int, after: State) -> None:
        """Time passes at work only while a step is under way; else the engine waits for somebody to ask."""
        steps = after.planned - self._clock_step
        if self._clock_us and steps > 0 and clock_us > self._clock_us:
            self._counts["step_us"][rounded((clock_us - self._clock_us) / steps)] += steps
        self._clock_us, self._clock_step = (clock_us, after.planned) if after.flights else (0, 0)

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
