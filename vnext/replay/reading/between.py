"""Between: what steps were like and what clients saw in a part of a log by the clock, folded for the question.

Owns where folding begins, so long before the part that requests of its first steps have arrived, and where counting does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.log.codec import Frame
from vnext.log.timestamps import Timestamps
from vnext.replay.reading.client_latency import ClientLatency, LatencyCollector
from vnext.replay.reading.folding import IMPOSSIBLE
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.step_counts import StepCounter, StepCounts
from vnext.replay.reading.strides import Folding
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.window import Window, planned_by, recorded
from vnext.replay.reading.writer import copied
from vnext.state.events import StepCommitted

LEAD_US = 300e6
"""Requests that arrived so long before the part are older, and their first tokens are not counted."""


class Part(NamedTuple):
    """The steps and latencies whose ends lie in a window, the tokens sampled in it, and why folding stopped, "" at its end."""

    step_counts: StepCounts
    latency: ClientLatency
    sampled_tokens: int
    stopped: str


def between(index: Index, window: Window) -> Part:
    """A part of a log. Raises UnusableLog where the log has no times, or none in the window."""
    timestamps = timestamps_of(index.log)
    if timestamps is None:
        raise UnusableLog("the log has no times, so no part of it can be named by the clock")
    begin, end = (_event_at(timestamps, us) for us in recorded(timestamps, window))
    place, clock = index.at_event(_event_at(timestamps, window.from_us - LEAD_US)), Clock(timestamps, absolute=True)
    latency = LatencyCollector(None, place.state, clock)
    folding, sampled, stopped = Folding(place.state, latency.hear), 0, ""
    counter = StepCounter(StepCounts(), place.state, clock) if place.state.sequence >= begin else None
    try:
        for _, item in folding.through((0, item) for item in place.items):
            if not isinstance(item, Frame):
                continue
            if counter is not None:
                counter.meet(item, folding.state)
                sampled += sum(len(event.tokens) // 4 for event in item.events if isinstance(event, StepCommitted))
            elif folding.state.sequence >= begin:
                counter = StepCounter(StepCounts(), folding.state, clock)
                latency.forget()
            if folding.state.sequence >= end:
                break
    except IMPOSSIBLE as error:
        stopped = str(error)
    counts = (counter or StepCounter(StepCounts(), folding.state, clock)).done()
    return Part(counts, latency.done(), sampled, stopped)


def _event_at(timestamps: Timestamps, us: float) -> int:
    """The number of the event before which all frames were written before this time."""
    frames = int(np.searchsorted(timestamps.times_ns, us * 1e3))
    return int(timestamps.events[frames - 1]) if frames else 0


@contextmanager
def log_between(index: Index, window: Window) -> Iterator[Log]:
    """The steps of a log with times that were planned in a window, as a log of their own. Raises UnusableLog."""
    timestamps = timestamps_of(index.log)
    assert timestamps is not None, "a window of the log's times"
    first, end = (planned_by(index, timestamps, us) for us in window)
    with steps_between(index, first, max(end, first + 1)) as part:
        yield part


@contextmanager
def steps_between(index: Index, first: int, end: int) -> Iterator[Log]:
    """The log's steps from `first` up to before `end`, as far as it has them. Raises UnusableLog."""
    first, end = max(min(first, index.last.planned - 1), index.segments[0].counts[1]), min(end, index.last.planned)
    with tempfile.TemporaryDirectory() as folder:
        try:
            writer, _, _ = copied(index, Path(folder) / "part", first, end)
        except IMPOSSIBLE as error:
            raise UnusableLog(f"steps {first} to {end} of the log cannot be read: {error}") from error
        writer.close()
        yield open_log(Path(folder) / "part")
