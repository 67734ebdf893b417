"""Intervals: between which values a figure of another run lies in nine cases of ten, as far as logs can tell.

The variance of such a figure has parts, and each is estimated from logs:

- sampling: when hiccups come, and for how long the machine is slow. A run is repeated on its log's stretches, drawn anew.
- the model: each of these runs fits it again, to steps with errors of the drawn ones, so what few steps show varies most.
- run to run: what is the same within a log and another one between two. Several logs of the same settings predict a figure
  each; what these differ by holds all parts, and counts where it is more. One log cannot show it.

What is predicted from n runs is itself uncertain by an n-th of a run's variance. A variance that few values estimate may be too
small, so each counts with its own quantile of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

Bounds = tuple[float, float]
LEVEL = 0.90
TAIL = (1 + LEVEL) / 2


def interval(runs: Sequence[float], draws: Sequence[Sequence[float]]) -> Bounds:
    """The bounds of a figure that runs on one log or more gave, with the draws of each."""
    values = [*runs, *(value for each in draws for value in each)]
    if min(values) <= 0:
        return _around(runs, draws)
    low, high = _around([math.log(run) for run in runs], [[math.log(value) for value in each] for each in draws])
    return math.exp(low), math.exp(high)


def _around(runs: Sequence[float], draws: Sequence[Sequence[float]]) -> Bounds:
    away = [value - run for run, each in zip(runs, draws) for value in each]
    within = fmean(each * each for each in away) if away else 0.0
    half = student(len(away)) * math.sqrt(within) if away else 0.0
    if len(runs) > 1:
        half = max(half, student(len(runs) - 1) * math.sqrt(variance(runs)))
    half *= math.sqrt(1 + 1 / len(runs))
    return fmean(runs) - half, fmean(runs) + half


def student(freedom: int) -> float:
    """The quantile at TAIL of Student's t: exact for one degree of freedom, within 1.3 % for more (Cornish and Fisher's series)."""
    if freedom == 1:
        return math.tan(math.pi * (TAIL - 0.5))
    z = NormalDist().inv_cdf(TAIL)
    terms = (
        z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )  # fmt: skip
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
