"""Step noise: how much steps differ that are equal in everything a model of step times may know.

Owns the bound that is reported beside the model's errors. Steps of equal token and request counts, whose context and
attention differ by at most BIN, take times that spread around their median. No function of a step's composition can
predict them much more closely, so only the part of a model's error beyond that spread is its own. The spread comes from
the machine: other work on its cores, its clock, memory.
"""

from __future__ import annotations

import msgspec
import numpy as np

BIN = 0.02
ALIKE_MIN = 5
"""Fewer equal steps do not determine a usual time."""


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
