"""Step times: a model that predicts the time of steps that never ran, fitted to those of a log (recording.py).

The model is piecewise linear in tokens, requests and context (positions read), with knots at quantiles of this log and
powers of two, and linear in attended (token-position pairs of attention). No slope is negative. Beyond a feature's
largest value in the log, each unit costs the average up to there. Every HELD_OUT-th step is left out of the fit, and the
reported errors are those of these steps; `noise` has the bound for any model, `Pace` the moments at which a machine is slow.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from vnext.replay.reading.source import UnusableLog
from vnext.state.state import StepInFlight

HELD_OUT = 4
STEPS_MIN = 50
"""Fewer steps are not enough for a fit."""
KNOTTED = 3
"""Tokens, requests and context may change their slope."""
COUNTED = (0, 1)
STEPS_FOR_POWERS = 500
KNOT_QUANTILES = (0.25, 0.5, 0.75, 0.9)
KNOT_MIN = 10
"""At least this many steps lie on each side of a knot."""
FLOOR_SHARE = 0.5
"""A prediction is at least this share of the shortest observed step."""
WINDOW_US = 100_000.0
WINDOW_STEPS = 32
"""A window lasts at least this long, and has at least this many steps."""
BETWEEN = 0.3
ROUNDS = 8
GAIN_MIN = 1e-9
"""A weight that gains less stays at zero."""
LEAST_SHARE = 0.02
"""During the fit a step counts as taking at least this share of the usual time."""
BIN = 0.02
ALIKE_MIN = 5
"""Fewer equal steps do not determine a usual time."""
KINDS = 4
HICCUP_FROM = 2.0
STRETCH_STEPS = 32
STRETCHES = 8
"""Hiccups cluster: so many stretches make up a log, of STRETCH_STEPS or more."""
LEAST_US = 0.01
DIGITS = 3
"""Ends are rounded to thousandths of a microsecond, so that sums of floats do not separate equal moments."""


Part = tuple[float, Sequence[float], Sequence[float], Sequence[float], Sequence[float]]
"""What a feature adds: its largest value, its knots, where its stretches begin, their slopes, and what those before add."""


class Model(msgspec.Struct, frozen=True):
    """Predicts a step's time. `knots` are those of tokens, requests and context; `largest` float64[4] is each feature's
    maximum in the log. Errors are relative, on steps outside of the fit."""

    weights: np.ndarray
    largest: np.ndarray
    knots: tuple[tuple[float, ...], ...]
    floor_us: float
    error_p50: float
    error_p90: float
    error_p99: float
    steps: int

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Microseconds (float64[n]) of steps with these features."""
        usual: np.ndarray = np.maximum(_basis(features, self.knots, self.largest) @ self.weights, self.floor_us)
        return usual

    def single(self) -> Callable[[StepInFlight], float]:
        """As `predict`, for one step at a time and without arrays."""
        constant, *slopes = self.weights.tolist()
        parts, floor_us = list[Part](), self.floor_us
        for most, own in zip(self.largest.tolist(), (*self.knots, ())):
            own_slopes, slopes = slopes[: len(own) + 1], slopes[len(own) + 1 :]
            ends = np.cumsum(np.diff((0.0, *own)) * own_slopes[: len(own)]).tolist()
            parts.append((most, own, [0.0, *own], own_slopes, [0.0, *ends]))

        def step_us(scheduled: StepInFlight) -> float:
            us: float = constant
            for value, (most, own, begins, own_slopes, passed) in zip(features_of(scheduled).tolist(), parts):
                at = min(value, most)
                place = bisect_left(own, at)
                us += max(value / most, 1.0) * (passed[place] + own_slopes[place] * (at - begins[place]))
            return float(max(us, floor_us))

        return step_us


def features_of(scheduled: StepInFlight) -> np.ndarray:
    """Tokens, requests, context and attended of a step (float64[4])."""
    ends = scheduled.starts + scheduled.counts
    attended = (scheduled.counts * (scheduled.starts + ends)).sum() / 2
    return np.array([scheduled.tokens, len(scheduled.samples), ends.sum(), attended], dtype=np.float64)


# ---- the fit -----------------------------------------------------------------------------------------------------


def fit(features: np.ndarray, step_us: np.ndarray, began_us: np.ndarray) -> Model:
    """The model of these steps (float64[n, 4], float64[n]) in order, which began at `began_us` (float64[n]). Raises
    UnusableLog if there are too few."""
    usable = step_us > 0
    features, step_us, began_us = features[usable], step_us[usable], began_us[usable]
    if len(step_us) < STEPS_MIN:
        raise UnusableLog(f"{len(step_us)} timed steps are too few to learn step times from: give a log of {STEPS_MIN} or more")
    held = _held(len(step_us))
    knots = tuple(_knots(features[~held, place], place in COUNTED) for place in range(KNOTTED))
    floor = FLOOR_SHARE * float(step_us.min())
    largest = np.maximum(features.max(axis=0), 1.0)
    basis, stretches = _basis(features[~held], knots, largest), [len(own) + 1 for own in (*knots, ())]
    weights = least(basis, stretches, step_us[~held], windows_of(began_us[~held]))
    model = Model(weights, largest, knots, floor, 0.0, 0.0, 0.0, len(step_us))
    errors = np.abs(model.predict(features[held]) - step_us[held]) / step_us[held]
    error_p50, error_p90, error_p99 = np.percentile(errors, (50, 90, 99)).tolist()
    return msgspec.structs.replace(model, error_p50=error_p50, error_p90=error_p90, error_p99=error_p99)


def held_out(features: np.ndarray, step_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps that `fit` leaves out."""
    usable = step_us > 0
    held = _held(int(np.count_nonzero(usable)))
    return features[usable][held], step_us[usable][held]


def _held(count: int) -> np.ndarray:
    held: np.ndarray = np.arange(count) % HELD_OUT == HELD_OUT - 1
    return held


def _knots(values: np.ndarray, counted: bool) -> tuple[float, ...]:
    """Where the slope may change: quantiles and, for `counted` values, powers of two, each once; KNOT_MIN steps or more
    lie on each side."""
    found = np.quantile(values, KNOT_QUANTILES)
    if counted and len(values) >= STEPS_FOR_POWERS:
        found = np.concatenate([found, 2.0 ** np.arange(np.log2(values.max() + 1))])
    ascending = np.sort(values)
    least, most = ascending[min(KNOT_MIN, len(values)) - 1], ascending[-min(KNOT_MIN, len(values))]
    return tuple(knot for knot in np.unique(found).tolist() if values.min() < knot < values.max() and least <= knot <= most)


def _basis(features: np.ndarray, knots: tuple[tuple[float, ...], ...], largest: np.ndarray) -> np.ndarray:
    """A constant, and how far each feature reaches into each stretch between its knots; beyond a feature's largest
    value all its stretches scale with it."""
    larger, values = np.maximum(features / largest, 1.0), np.minimum(features, largest)
    columns = [np.ones(len(features))]
    for place, own in enumerate((*knots, ())):
        for begin, end in itertools.pairwise((0.0, *own, np.inf)):
            columns.append(larger[:, place] * np.clip(values[:, place] - begin, 0.0, end - begin))
    return np.column_stack(columns)


# ---- what steps cost on a machine that is slow at times ----------------------------------------------------------


# While a machine is slow a queue grows and steps get larger, so a fit that treats all steps alike mistakes slowness for the cost
# of size. Steps are therefore compared within their window of time. Differences between whole windows count less (BETWEEN) and
# decide only what no window shows. The initial paces come from a model with one slope per feature, which cannot mistake a
# slow window for a knee.


def windows_of(began_us: np.ndarray) -> np.ndarray:
    """The first step of each window of time (int64[m], ascending, from 0), for n > 0 steps in order that began at
    `began_us` (float64[n])."""
    starts = [0]
    while (place := _window_end(began_us, starts[-1])) <= len(began_us) - WINDOW_STEPS:
        starts.append(place)
    return np.array(starts)


def _window_end(began_us: np.ndarray, start: int) -> int:
    return max(int(np.searchsorted(began_us, began_us[start] + WINDOW_US)), start + WINDOW_STEPS)


def least(basis: np.ndarray, stretches: list[int], step_us: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Weights (float64[k]), none negative, of a basis (float64[n, k]) for steps (float64[n]) in windows that begin at
    `starts`.

    The basis is a constant and the given number of stretches for each feature (`stretches`). The weights are those of
    the machine at its usual pace.
    """
    begins = np.cumsum([0, 1, *stretches[:-1]])
    straight = np.add.reduceat(basis, begins, axis=1)
    usual, pace = np.full(len(step_us), float(np.median(step_us))), np.ones(len(starts))
    for columns in (straight, basis):
        weights, usual, pace = _rounds(columns, step_us, starts, usual, pace)
    return weights


def _rounds(
    basis: np.ndarray, step_us: np.ndarray, starts: np.ndarray, usual: np.ndarray, prior: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, usual times and paces, each computed from the others, round by round; paces are drawn towards the
    `prior` ones.

    Within a window most of each mean is subtracted from all compared values: quasi-demeaning, as in models with random
    effects. Outliers (a pause, a window that has two paces) weigh less from round to round.
    """
    counts = np.diff(starts, append=len(step_us))
    between = BETWEEN**2 if len(starts) > 1 else 1.0
    scale = np.abs(basis).max(axis=0)
    scale[scale == 0] = 1.0
    columns, least_us = basis / scale, LEAST_SHARE * float(np.median(step_us))
    pace, trust = prior, np.ones(len(step_us))
    for _ in range(ROUNDS):
        shares = columns / usual[:, None]
        wanted = step_us / (usual * np.repeat(pace, counts)) + np.repeat(np.log(pace / prior), counts)
        trusted, total = shares * trust[:, None], np.add.reduceat(trust, starts)
        means, wanted_means = np.add.reduceat(trusted, starts) / total[:, None], np.add.reduceat(trust * wanted, starts) / total
        taken_off = (1 - between) * total[:, None] * means
        weights = _least_positive(shares.T @ trusted - means.T @ taken_off, trusted.T @ wanted - taken_off.T @ wanted_means)
        usual = np.maximum(columns @ weights, least_us)
        pace = _paces(starts, step_us / usual)
        level = float(np.median(np.repeat(pace, counts)))
        weights, usual, pace = weights * level, usual * level, pace / level
        far = np.abs(step_us / (usual * np.repeat(pace, counts)) - 1)
        spread = 3 * float(np.median(far)) + 1e-9
        trust = (spread / np.maximum(far, spread)) ** 2
    return weights / scale, usual, pace


def _paces(starts: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """The pace of each window (float64[m]): the median of how much longer its steps took than usual (`ratios`,
    float64[n])."""
    return np.array([float(np.median(part)) for part in np.split(ratios, starts[1:])])


def _least_positive(squares: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Least squares with weights (float64[k]), none negative, from the normal equations (float64[k, k], float64[k]):
    the active set method of Lawson and Hanson (1974)."""
    weights, used = np.zeros(len(along)), np.zeros(len(along), dtype=bool)
    for _ in range(3 * len(along)):
        gains = np.where(used, 0.0, along - squares @ weights)
        if gains.max() <= GAIN_MIN * np.abs(along).max():
            break
        used[int(gains.argmax())] = True
        while used.any():
            best = np.zeros(len(along))
            best[used] = np.linalg.lstsq(squares[np.ix_(used, used)], along[used], rcond=1e-12)[0]
            below = used & (best <= 0)
            if not below.any():
                weights = best
                break
            share = (weights[below] / np.maximum(weights[below] - best[below], 1e-300)).min()
            weights = weights + share * (best - weights)
            used &= weights > 1e-15
            weights[~used] = 0.0
    return weights


# ---- how much equal steps differ ---------------------------------------------------------------------------------


# Steps of equal token and request counts, whose context and attention differ by at most BIN, take times that spread around
# their median. No function of a step's composition can predict them much more closely, so only the part of a model's error beyond
# that spread is its own. The spread comes from the machine: other work on its cores, its clock, memory.


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Relative distances of `steps` steps, or of a model, from the median of similar steps; zeros if there are none."""

    steps: int
    p50: float
    p90: float
    p99: float


def noise(features: np.ndarray, step_us: np.ndarray) -> Noise:
    """The noise of steps with these features (float64[n, 4], as step_times.features_of) and times (float64[n])."""
    groups = _alike(features, step_us)
    return _summary([np.abs(np.median(step_us[group]) - step_us[group]) / step_us[group] for group in groups])


def misfit(features: np.ndarray, step_us: np.ndarray, predicted_us: np.ndarray) -> Noise:
    """How far a model's prediction (float64[n]) is from the median of similar steps: its own error, with little noise.

    For steps outside of the fit. A median of few steps is not exact either.
    """
    groups = _alike(features, step_us)
    medians = [np.median(step_us[group]) for group in groups]
    return _summary([np.abs(predicted_us[group] - usual) / usual for group, usual in zip(groups, medians)])


def _alike(features: np.ndarray, step_us: np.ndarray) -> list[np.ndarray]:
    """Places (int64[]) of similar steps, ALIKE_MIN or more each."""
    places = np.flatnonzero(step_us > 0)
    bins = np.floor(np.log(features[places, 2:] + 1) / np.log1p(BIN))
    order = np.lexsort((bins[:, 1], bins[:, 0], features[places, 1], features[places, 0]))
    kinds, places = np.column_stack([features[places[order], :2], bins[order]]), places[order]
    begins = np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1
    return [group for group in np.split(places, begins) if len(group) >= ALIKE_MIN]


def _summary(parts: list[np.ndarray]) -> Noise:
    away = np.concatenate([np.empty(0), *parts])
    p50, p90, p99 = np.percentile(away, (50, 90, 99)).tolist() if len(away) else (0.0, 0.0, 0.0)
    return Noise(steps=len(away), p50=p50, p90=p90, p99=p99)


# ---- the pace of a machine ---------------------------------------------------------------------------------------


# A model predicts usual times, but a machine has hiccups: pauses, busy neighbours, or clients and the API server at work when a
# request arrives. They belong to moments, not to steps. So each recorded step says how much usual time passed during its own
# time, and a hypothetical step ends when its usual time has passed. Under the recorded settings every step then ends when it did.
# Under others the hiccups come when they came, and a pause takes the same time whatever step it meets. While the engine waited,
# the pace is the mean one.
#
# `Drawn` is a machine with the same hiccups at other moments; what-if uses it to learn how much the moments matter. Each step gets
# the hiccup of a recorded step of its kind. Steps are drawn with replacement in stretches of an eighth of the log, because whole
# seconds can be slow too (a block bootstrap), and the model is fitted again, to the recorded steps with errors of drawn ones.


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
    """Drawn steps of these kinds (int64[n]) took `took_us` where `usual_us` is usual (float64[n]). Mutable: each call of
    `end_us` takes the next hiccup of the step's kind. Up to HICCUP_FROM times the usual time counts as a
    slowdown by a factor; the rest was a pause, which takes the same time in any other step.
    """

    def __init__(self, kinds: np.ndarray, took_us: np.ndarray, usual_us: np.ndarray) -> None:
        factors = np.minimum(took_us / usual_us, HICCUP_FROM)
        pauses_us = np.maximum(took_us - HICCUP_FROM * usual_us, 0.0)
        self._hiccups: dict[int, Iterator[tuple[float, float]]] = {}
        for kind in range(KINDS):
            places = np.flatnonzero(kinds == kind)
            if len(places) < STRETCH_STEPS:  # too few for a usual time
                places = np.arange(len(kinds))
            self._hiccups[kind] = itertools.cycle(zip(factors[places].tolist(), pauses_us[places].tolist()))

    def end_us(self, begin_us: float, usual_us: float, kind: int) -> float:
        """When a step of this kind ends that begins at `begin_us` and usually takes `usual_us`."""
        factor, pause_us = next(self._hiccups[kind])
        return begin_us + usual_us * factor + pause_us


def stretches(count: int, seed: int) -> np.ndarray:
    """So many places of as many steps (int64[count]), drawn in stretches with replacement."""
    size = max(STRETCH_STEPS, -(-count // STRETCHES))
    starts = np.random.default_rng(seed).integers(0, count, -(-count // size))
    drawn: np.ndarray = (starts[:, None] + np.arange(size)).ravel()[:count] % count
    return drawn


def of_kinds(kinds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each step of these kinds (int64[n]) one of its kind: in order those at these places, again and again."""
    like = places.copy()
    for kind in range(KINDS):
        own, drawn = np.flatnonzero(kinds == kind), places[kinds[places] == kind]
        like[own] = np.resize(drawn if len(drawn) else own, len(own))
    return like


def _mapped(points: list[float], values: list[float], at: float) -> float:
    """The value at a place, interpolated linearly between two points; after the last point the points start over."""
    rounds, at = divmod(at, points[-1])
    place = min(bisect_right(points, at), len(points) - 1) - 1
    low, high = points[place], points[place + 1]
    return rounds * values[-1] + values[place] + (at - low) / (high - low) * (values[place + 1] - values[place])
