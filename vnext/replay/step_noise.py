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
    """Relative distances of `steps` steps from the median of those that are like them; zeros where there are none such."""

    steps: int
    p50: float
    p90: float
    p99: float


def noise(features: np.ndarray, step_us: np.ndarray) -> Noise:
    """Of steps with these features (float64[n, 4], as step_times.features_of) and times (float64[n])."""
    usable = step_us > 0
    features, step_us = features[usable], step_us[usable]
    bins = np.floor(np.log(features[:, 2:] + 1) / np.log1p(BIN))
    order = np.lexsort((bins[:, 1], bins[:, 0], features[:, 1], features[:, 0]))
    kinds, times = np.column_stack([features[order, :2], bins[order]]), step_us[order]
    begins = np.flatnonzero(np.concatenate(([True], (kinds[1:] != kinds[:-1]).any(axis=1)))) if len(kinds) else []
    alike = [group for group in np.split(times, begins[1:]) if len(group) >= ALIKE_MIN]
    if not alike:
        return Noise(steps=0, p50=0.0, p90=0.0, p99=0.0)
    away = np.concatenate([np.abs(np.median(group) - group) / group for group in alike])
    p50, p90, p99 = np.percentile(away, (50, 90, 99)).tolist()
    return Noise(steps=len(away), p50=p50, p90=p90, p99=p99)
