"""Pace: how fast a machine progressed through a log's time, compared with the usual time of its steps.

A model predicts usual times, but a machine has hiccups: pauses, busy neighbours, or clients and the API server at work
when a request arrives. They belong to moments, not to steps. So each recorded step says how much usual time passed
during its own time, and a hypothetical step ends when its usual time has passed. Under the recorded settings every step
then ends when it did. Under others the hiccups come when they came, and a pause takes the same time whatever step it
meets. While the engine waited, the pace is the mean one.

`Drawn` is a machine with the same hiccups at other moments; what-if uses it to learn how much the moments matter. Each
step gets the hiccup of a recorded step of its kind, drawn in stretches with replacement (a block bootstrap of the
model's residuals). Every other seed draws stretches of an eighth of the log, because whole seconds can be slow too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np

KINDS = 4
HICCUP_FROM = 2.0
STRETCH_STEPS = 32
LONG_STRETCHES = 8
"""Hiccups cluster: this many consecutive steps keep theirs together, or this many stretches make up the whole log."""
LEAST_US = 0.01
DIGITS = 3
"""Ends are rounded to thousandths of a microsecond, so that sums of floats do not separate equal moments."""


class Pace:
    """Recorded steps began at `began_us` and ended at `ends_us` (float64[n], consecutive); `usual_us` float64[n] is
    what the model predicts for each. After the log's end its time starts over."""

    def __init__(self, began_us: np.ndarray, ends_us: np.ndarray, usual_us: np.ndarray) -> None:
        times = np.column_stack([began_us, ends_us]).ravel()
        times[1::2] += np.where(ends_us > began_us, 0.0, LEAST_US)  # results that arrived at once
        spans = np.diff(np.maximum.accumulate(times), prepend=0.0)
        waited, took = spans[::2], np.maximum(spans[1::2], LEAST_US)
        mean = usual_us.sum() / max(took.sum(), LEAST_US) or 1.0
        durations, usual = np.column_stack([waited, took]).ravel(), np.column_stack([waited * mean, usual_us]).ravel()
        self._lay(durations[durations > 0], usual[durations > 0])

    def _lay(self, durations: np.ndarray, usual: np.ndarray) -> None:
        """Lay out consecutive stretches of time, and the usual time that passes in each."""
        if not len(durations):
            durations = usual = np.ones(1)
        self._times, self._usual = ([0.0, *np.cumsum(values).tolist()] for values in (durations, usual))

    def end_us(self, begin_us: float, usual_us: float, _: int) -> float:
        """When a step ends that begins at `begin_us` and usually takes `usual_us`; its kind does not matter."""
        passed = _mapped(self._times, self._usual, begin_us) + usual_us
        return round(max(_mapped(self._usual, self._times, passed), begin_us), DIGITS)


class Drawn:
    """Recorded steps of these kinds (int64[n]) took `took_us` where `usual_us` is usual (float64[n]). Mutable: each
    call of `end_us` takes the next hiccup of the step's kind. Up to HICCUP_FROM times the usual time counts as a
    slowdown by a factor; the rest was a pause, which takes the same time in any other step.
    """

    def __init__(self, kinds: np.ndarray, took_us: np.ndarray, usual_us: np.ndarray, seed: int) -> None:
        factors = np.minimum(took_us / usual_us, HICCUP_FROM)
        pauses_us = np.maximum(took_us - HICCUP_FROM * usual_us, 0.0)
        self._hiccups = {}
        for kind in range(KINDS):
            places = np.flatnonzero(kinds == kind)
            if len(places) < STRETCH_STEPS:  # too few for a usual time
                places = np.arange(len(kinds))
            size = STRETCH_STEPS if seed % 2 else max(STRETCH_STEPS, len(places) // LONG_STRETCHES)
            drawn = _stretches(places, size, np.random.default_rng((seed, kind)))
            self._hiccups[kind] = itertools.cycle(zip(factors[drawn].tolist(), pauses_us[drawn].tolist()))

    def end_us(self, begin_us: float, usual_us: float, kind: int) -> float:
        """When a step of this kind ends that begins at `begin_us` and usually takes `usual_us`."""
        factor, pause_us = next(self._hiccups[kind])
        return begin_us + usual_us * factor + pause_us


def _stretches(places: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """As many of these places, in stretches of `size`."""
    starts = rng.integers(0, len(places), -(-len(places) // size))
    return places[(starts[:, None] + np.arange(size)).ravel()[: len(places)] % len(places)]


def _mapped(points: list[float], values: list[float], at: float) -> float:
    """The value at a place, interpolated linearly between two points; after the last point the points start over."""
    rounds, at = divmod(at, points[-1])
    place = min(bisect_right(points, at), len(points) - 1) - 1
    low, high = points[place], points[place + 1]
    return rounds * values[-1] + values[place] + (at - low) / (high - low) * (values[place + 1] - values[place])
