"""Step times: how long a log's steps took, and a model that predicts the time of steps that never ran.

Events hold no step times. Timestamps beside the segments say when each frame was written, and how long rank 0 was busy
with each step (times.py). A turn's overhead (transport, the engine core, waking) is the median time that was not busy,
from a step's plan, or from the commit before if that came later, to its commit. There is one median per kind of turn:
after a wait or not, with a prompt or not. Without busy times that whole span is the step's time.

The model is piecewise linear in tokens, requests and context (positions read), with knots at quantiles of this log and
powers of two, and linear in attended (token-position pairs of attention). No slope is negative. Beyond a feature's
largest value in the log, each unit costs the average up to there. paced_fit.py computes the weights. Every HELD_OUT-th
step is left out of the fit, and the reported errors are those of these steps; step_noise.py has the bound.
"""

from __future__ import annotations

import itertools
import math
import operator

import msgspec
import numpy as np

from vnext.replay.futures.drafts_seen import DraftsSeen
from vnext.replay.futures.loads import Loads, LoadsSeen
from vnext.replay.futures.paced_fit import least, windows_of
from vnext.replay.futures.revived import Revived, revived
from vnext.replay.reading.folding import Broken, Folded, first_state, fold
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    WeightsChanged,
    unpack_tokens,
)
from vnext.state.outputs import outputs
from vnext.state.state import State, StepInFlight

HELD_OUT = 4
STEPS_MIN = 50
"""Fewer steps are not enough for a fit."""
KNOTTED = 3
"""Tokens, requests and context may change their slope."""
COUNTED = (0, 1)
STEPS_FOR_POWERS = 500
KNOT_QUANTILES = (0.25, 0.5, 0.75, 0.9)
KIND_MIN = 10
"""Fewer turns of a kind do not determine its usual overhead."""
FLOOR_SHARE = 0.5
"""A prediction is at least this share of the shortest observed step."""


class Outside(msgspec.Struct, frozen=True):
    """An outside event, its time in us and, for an abort, how many tokens each request had received."""

    time_us: float
    event: AnyEvent
    reported: dict[int, int]


class Recorded(msgspec.Struct, frozen=True):
    """A whole log by its times. Its n committed steps have `features` float64[n, 4], took `step_us` float64[n], began
    at `began_us` and were committed at `ends_us`. `overhead_us` float64[2, 2] is a turn's overhead by `kinds_of`.
    `entries` is what each step computed (StepInFlight.entries), `commits` what it sampled. `answers` are tokens by
    request; those of `lives`, the requests in state `first` where the log begins, start with their last token there.
    `times_us` is when each of `events` happened. `loads` are those of adapters. `places` are the committed steps' places in the
    lists by their numbers, some of which ranks may have lost.
    """

    first: State
    lives: list[Revived]
    outside: list[Outside]
    features: np.ndarray
    step_us: np.ndarray
    overhead_us: np.ndarray
    began_us: np.ndarray
    ends_us: np.ndarray
    entries: list[np.ndarray]
    commits: list[StepCommitted]
    answers: dict[int, list[int]]
    events: list[AnyEvent]
    times_us: list[float]
    loads: Loads
    drafts: DraftsSeen
    places: dict[int, int]


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
        return np.maximum(_basis(features, self.knots, self.largest) @ self.weights, self.floor_us)

    def step_us(self, scheduled: StepInFlight) -> float:
        """As `predict`, for one step and without arrays."""
        known = [1.0]
        for value, most, own in zip(features_of(scheduled).tolist(), self.largest.tolist(), (*self.knots, ())):
            larger, value = max(value / most, 1.0), min(value, most)
            stretches = itertools.pairwise((0.0, *own, math.inf))
            known += [larger * min(max(value - begin, 0.0), end - begin) for begin, end in stretches]
        return max(sum(map(operator.mul, self.weights.tolist(), known)), self.floor_us)


def features_of(scheduled: StepInFlight) -> np.ndarray:
    """Tokens, requests, context and attended of a step (float64[4])."""
    ends = scheduled.starts + scheduled.counts
    attended = (scheduled.counts * (scheduled.starts + ends)).sum() / 2
    return np.array([scheduled.tokens, len(scheduled.samples), ends.sum(), attended], dtype=np.float64)


def recorded(log: Log) -> Recorded:
    """Everything in a log that what-if needs. Raises UnusableLog if it has no times."""
    timestamps = timestamps_of(log)
    if timestamps is None:
        raise UnusableLog(
            f"{log.paths[0].parent} has no step times (*.vnexttimes beside the segments): "
            "record a log with this version, or name one with --times-of"
        )
    clock = Clock(timestamps)
    taken = _Taken(timestamps.busy_ns, first_state(log))
    for item in fold(log):
        if isinstance(item, Broken):
            break
        if isinstance(item, Folded):
            if (now_us := clock.known_us(item.frame_end, item.before.committed)) is None:
                break  # a killed engine leaves its last second without times
            taken.hear(item, now_us)
    return taken.recorded()


class _Taken:
    """Collects a recording while the log is folded. Mutable."""

    def __init__(self, busy_ns: dict[int, int], first: State) -> None:
        self._busy_ns = busy_ns
        self._first, self._lives = first, revived(first)
        self._planned_us: dict[int, float] = {}
        self._last_us = 0.0
        self._outside: list[Outside] = []
        self._steps: list[tuple[np.ndarray, float, float]] = []
        self._entries: list[np.ndarray] = []
        self._commits: list[StepCommitted] = []
        self._places: dict[int, int] = {}
        self._answers = {life.arrival.id: unpack_tokens(life.last).tolist() for life in self._lives}
        self._events: list[AnyEvent] = []
        self._times_us: list[float] = []
        self._loads, self._drafts = LoadsSeen(), DraftsSeen({}, {})

    def hear(self, item: Folded, now_us: float) -> None:
        event = item.event
        self._events.append(event)
        self._times_us.append(now_us)
        self._loads.hear(event, item.after, now_us)
        match event:
            case StepPlanned():
                self._planned_us[event.step] = now_us
            case StepCommitted():
                scheduled = item.before.in_flight[0]
                began_us = max(self._planned_us.get(event.step, 0.0), self._last_us)
                self._steps.append((features_of(scheduled), began_us, now_us))
                self._entries.append(scheduled.entries)
                self._places[event.step] = len(self._commits)
                self._commits.append(event)
                self._last_us = now_us
                self._drafts.hear(scheduled, event, self._answers)
                for news in outputs(item.before, event, item.after):
                    self._answers.setdefault(news.id, []).append(news.token)
            case RequestArrived() | PrefixCacheReset() | EngineRecovered():
                if isinstance(event, RequestResumed):
                    self._answers[event.id] = unpack_tokens(event.generated).tolist()
                self._outside.append(Outside(now_us, event, {}))
            case WeightsChanged() | EnginePaused(mode="sleep"):
                self._outside.append(Outside(now_us, PrefixCacheReset(), {}))
            case RequestAborted():
                reported = {id_: len(self._answers.get(id_, ())) for id_ in event.ids}
                self._outside.append(Outside(now_us, event, reported))

    def recorded(self) -> Recorded:
        features = np.array([step[0] for step in self._steps]).reshape(-1, 4)
        began, ends = (np.array([step[place] for step in self._steps], dtype=np.float64) for place in (1, 2))
        busy = np.array([self._busy_ns.get(step, 0) for step in self._places]) / 1e3
        all_busy = bool(len(busy)) and bool((busy > 0).all())
        step_us = busy if all_busy else ends - began
        overhead_us = _medians(kinds_of(features, began, ends), ends - began - step_us)
        return Recorded(
            self._first, self._lives, self._outside, features, step_us, overhead_us, began, ends, self._entries, self._commits,
            self._answers, self._events, self._times_us, self._loads.loads, self._drafts, self._places,
        )  # fmt: skip


def kinds_of(features: np.ndarray, began_us: np.ndarray, ends_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each step, whether the engine had waited before it, and whether it computes more than one token of a request
    (int64[n])."""
    waited = began_us > np.concatenate([[0.0], ends_us[:-1]])
    return waited.astype(np.int64), (features[:, 0] > features[:, 1]).astype(np.int64)


def _medians(kinds: tuple[np.ndarray, np.ndarray], overheads_us: np.ndarray) -> np.ndarray:
    """The usual overhead of each kind (float64[2, 2]); a rare kind gets that of all steps."""
    usual = np.full((2, 2), max(float(np.median(overheads_us)), 0.0) if len(overheads_us) else 0.0)
    for kind in np.ndindex(2, 2):
        of_kind = overheads_us[(kinds[0] == kind[0]) & (kinds[1] == kind[1])]
        if len(of_kind) >= KIND_MIN:
            usual[kind] = max(float(np.median(of_kind)), 0.0)
    return usual


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
    return np.arange(count) % HELD_OUT == HELD_OUT - 1


def _knots(values: np.ndarray, counted: bool) -> tuple[float, ...]:
    """Where the slope may change: quantiles and, for `counted` values, powers of two, each once; KIND_MIN steps or more
    lie on each side."""
    found = np.quantile(values, KNOT_QUANTILES)
    if counted and len(values) >= STEPS_FOR_POWERS:
        found = np.concatenate([found, 2.0 ** np.arange(np.log2(values.max() + 1))])
    ascending = np.sort(values)
    least, most = ascending[min(KIND_MIN, len(values)) - 1], ascending[-min(KIND_MIN, len(values))]
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
