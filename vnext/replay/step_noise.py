"""Step noise: by how much steps differ that are equal in all that a model of step times may know.

Owns the bound beside the model's errors: steps of as many tokens and requests, whose context and attention differ by at most
BIN, take times that spread around their median. No function of a step's composition is nearer to them than about that, so a
model's error is its own only as far as it is larger. The spread is the machine's: other work on its cores, its clock, memory.
"""

from __future__ import annotations

import msgspec
import numpy as np

BIN = 0.02
ALIKE_MIN = 5
"""Fewer equal steps do not tell what is usual among them."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Relative distances of `steps` steps, or of a model, from the median of those that are alike; zeros where there are none."""

    steps: int
    p50: float
    p90: float
    p99: float


def noise(features: np.ndarray, step_us: np.ndarray) -> Noise:
    """Of steps with these features (float64[n, 4], as step_times.features_of) and times (float64[n])."""
    groups = _alike(features, step_us)
    return _summary([np.abs(np.median(step_us[group]) - step_us[group]) / step_us[group] for group in groups])


def misfit(features: np.ndarray, step_us: np.ndarray, predicted_us: np.ndarray) -> Noise:
    """How far what a model says (float64[n]) is from the median of those that are alike: its own error, with little noise.

    For steps that it was not fitted to. A median of few steps is not exact either.
    """
    groups = _alike(features, step_us)
    medians = [np.median(step_us[group]) for group in groups]
    return _summary([np.abs(predicted_us[group] - usual) / usual for group, usual in zip(groups, medians)])


def _alike(features: np.ndarray, step_us: np.ndarray) -> list[np.ndarray]:
    """Places (int64[]) of steps that are alike, ALIKE_MIN or more each."""
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
