"""Step times: what a log says of how long its steps took, and a model of that for steps that never ran.

The log holds no step time among its events; stamps beside its segments say when each frame was written, and how long rank 0
was busy with each step (times.py). What a turn costs beside that (transport, the engine core) is one number for all steps:
the mean of what lies between a step's commit and its plan, or the commit before it if that came later, and was not busy.
Without busy times that whole span is the step's time.

The model is piecewise linear in what it knows of a step: tokens, requests and context (positions read) with knots at quantiles
of this log, the first two also at powers of two where the log is long, and attended (token-position pairs of attention).
Fitted by least squares on relative errors, reweighted so that a few strange steps (a pause of the machine) do not bend it
(Holland and Welsch 1977). Every HELD_OUT-th step is left out, and the errors reported are of those; step_noise.py has the bound.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.replay.folding import Broken, Folded, fold
from vnext.replay.source import Log, UnusableLog
from vnext.replay.times import Clock, stamps_of
from vnext.state.events import (
    AnyEvent,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
)
from vnext.state.outputs import outputs
from vnext.state.state import Flight

HELD_OUT = 4
STEPS_MIN = 50
"""Fewer steps teach nothing."""
KNOTTED = 3
"""Tokens, requests and context may change their slope."""
COUNTED = (0, 1)
STEPS_FOR_POWERS = 500
KNOT_QUANTILES = (0.25, 0.5, 0.75, 0.9)
ROUNDS = 8
FLOOR_SHARE = 0.5
"""A prediction is at least so much of the shortest step that was seen."""


class Outside(msgspec.Struct, frozen=True):
    """Something that came from outside, its time in us, and of an abort the tokens that each request had been told."""

    time_us: float
    event: AnyEvent
    told: dict[int, int]


class Recorded(msgspec.Struct, frozen=True):
    """A whole log by its times. `features` float64[n, 4] and `step_us` float64[n] of its n committed steps, `ends_us` their
    commits, `overhead_us` what a turn costs beside each; `entries` what each step computed (Flight.entries) and
    `tokens` what it sampled; `answers` tokens by request, `times_us` when each of `events` happened."""

    outside: list[Outside]
    features: np.ndarray
    step_us: np.ndarray
    overhead_us: float
    ends_us: np.ndarray
    entries: list[np.ndarray]
    tokens: list[bytes]
    answers: dict[int, list[int]]
    events: list[AnyEvent]
    times_us: list[float]


class Model(msgspec.Struct, frozen=True):
    """Predicts a step's time. `knots` of tokens, requests and context. Errors are relative, of steps that it has not seen."""

    weights: np.ndarray
    knots: tuple[tuple[float, ...], ...]
    floor_us: float
    error_p50: float
    error_p90: float
    error_p99: float
    steps: int

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Microseconds (float64[n]) of steps with these features."""
        return np.maximum(_basis(features, self.knots) @ self.weights, self.floor_us)

    def step_us(self, flight: Flight) -> float:
        """As `predict`, of one step and without arrays."""
        tokens, requests, context, attended = features_of(flight).tolist()
        known = [1.0, tokens, requests, context, attended]
        for value, knots in zip((tokens, requests, context), self.knots):
            known += [max(value - knot, 0.0) for knot in knots]
        return max(sum(weight * value for weight, value in zip(self.weights.tolist(), known)), self.floor_us)


def features_of(flight: Flight) -> np.ndarray:
    """Tokens, requests, context and attended of a step (float64[4])."""
    ends = flight.starts + flight.counts
    attended = (flight.counts * (flight.starts + ends)).sum() / 2
    return np.array([flight.tokens, len(flight.samples), ends.sum(), attended], dtype=np.float64)


def recorded(log: Log) -> Recorded:
    """Everything of a log that what-if needs. UnusableLog if it has no times or does not begin at the engine's start."""
    stamps = stamps_of(log)
    if stamps is None:
        raise UnusableLog(
            f"{log.paths[0].parent} has no step times (*.vnexttimes beside the segments): record a log with this version"
        )
    if log.header.index:
        raise UnusableLog(f"{log.paths[0]} does not begin at the engine's start: give the whole log")
    clock = Clock(stamps)
    taken = _Taken(clock, stamps.busy_ns)
    for item in fold(log):
        if isinstance(item, Broken) or (isinstance(item, Folded) and not clock.knows(item.number)):
            break  # an engine that was killed leaves a last second without times
        if isinstance(item, Folded):
            taken.hear(item)
    return taken.recorded()


class _Taken:
    """The recording while it is folded. Mutable."""

    def __init__(self, clock: Clock, busy_ns: dict[int, int]) -> None:
        self._clock, self._busy_ns = clock, busy_ns
        self._planned_us: dict[int, float] = {}
        self._last_us = 0.0
        self._outside: list[Outside] = []
        self._steps: list[tuple[np.ndarray, float, float]] = []
        self._entries: list[np.ndarray] = []
        self._tokens: list[bytes] = []
        self._answers: dict[int, list[int]] = {}
        self._events: list[AnyEvent] = []
        self._times_us: list[float] = []

    def hear(self, item: Folded) -> None:
        event, now_us = item.event, self._clock.of(item.number, 0)
        self._events.append(event)
        self._times_us.append(now_us)
        match event:
            case StepPlanned():
                self._planned_us[event.step] = now_us
            case StepCommitted():
                flight = item.before.flights[0]
                began_us = max(self._planned_us[event.step], self._last_us)
                self._steps.append((features_of(flight), now_us - began_us, now_us))
                self._entries.append(flight.entries)
                self._tokens.append(event.tokens)
                self._last_us = now_us
                for news in outputs(item.before, event, item.after):
                    self._answers.setdefault(news.id, []).append(news.token)
            case RequestArrived() | PrefixCacheReset():
                self._outside.append(Outside(now_us, event, {}))
            case RequestAborted():
                told = {id_: len(self._answers.get(id_, ())) for id_ in event.ids}
                self._outside.append(Outside(now_us, event, told))

    def recorded(self) -> Recorded:
        features = np.array([step[0] for step in self._steps]).reshape(-1, 4)
        spans, ends = (np.array([step[place] for step in self._steps], dtype=np.float64) for place in (1, 2))
        busy = np.array([self._busy_ns.get(step, 0) for step in range(len(spans))]) / 1e3
        all_busy = bool(len(busy)) and bool((busy > 0).all())
        overhead_us = max(float((spans - busy).mean()), 0.0) if all_busy else 0.0
        return Recorded(
            self._outside, features, busy if all_busy else spans, overhead_us, ends, self._entries, self._tokens,
            self._answers, self._events, self._times_us,
        )  # fmt: skip


# ---- the fit -----------------------------------------------------------------------------------------------------


def fit(features: np.ndarray, step_us: np.ndarray) -> Model:
    """The model of these steps (float64[n, 4], float64[n]). UnusableLog if they are too few."""
    usable = step_us > 0
    features, step_us = features[usable], step_us[usable]
    if len(step_us) < STEPS_MIN:
        raise UnusableLog(f"{len(step_us)} timed steps are too few to learn step times from: give a log of {STEPS_MIN} or more")
    held = _held(len(step_us))
    knots = tuple(_knots(features[~held, place], place in COUNTED) for place in range(KNOTTED))
    floor = FLOOR_SHARE * float(step_us.min())
    weights = _least(_basis(features[~held], knots), step_us[~held])
    predicted = np.maximum(_basis(features[held], knots) @ weights, floor)
    errors = np.abs(predicted - step_us[held]) / step_us[held]
    return Model(weights, knots, floor, *np.percentile(errors, (50, 90, 99)).tolist(), len(step_us))


def held_out(features: np.ndarray, step_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps to which `fit` does not fit its model."""
    usable = step_us > 0
    held = _held(int(np.count_nonzero(usable)))
    return features[usable][held], step_us[usable][held]


def _held(count: int) -> np.ndarray:
    return np.arange(count) % HELD_OUT == HELD_OUT - 1


def _knots(values: np.ndarray, counted: bool) -> tuple[float, ...]:
    """Where the slope may change: quantiles, of what is `counted` powers of two as well, each once, none at the ends."""
    found = np.quantile(values, KNOT_QUANTILES)
    if counted and len(values) >= STEPS_FOR_POWERS:
        found = np.concatenate([found, 2.0 ** np.arange(np.log2(values.max() + 1))])
    return tuple(knot for knot in np.unique(found).tolist() if values.min() < knot < values.max())


def _basis(features: np.ndarray, knots: tuple[tuple[float, ...], ...]) -> np.ndarray:
    hinges = [np.maximum(values - knot, 0) for values, own in zip(features.T, knots) for knot in own]
    return np.column_stack([np.ones(len(features)), features, *hinges])


def _least(basis: np.ndarray, step_us: np.ndarray) -> np.ndarray:
    """Least squares on relative errors, far-off steps weighing less from round to round."""
    scale = np.abs(basis).max(axis=0)
    scale[scale == 0] = 1.0
    relative, trust = basis / scale / step_us[:, None], np.ones(len(step_us))
    weights = np.zeros(basis.shape[1])
    for _ in range(ROUNDS):
        weights = np.linalg.lstsq(relative * trust[:, None], trust, rcond=1e-10)[0]
        far = np.abs(relative @ weights - 1)
        spread = 3 * float(np.median(far)) + 1e-9
        trust = np.sqrt(np.minimum(1.0, spread / np.maximum(far, spread)))
    return weights / scale
