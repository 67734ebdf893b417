"""Confidence intervals of percentiles: the order statistics between which the true one lies with a given probability.

Of n values so many lie below a percentile as heads fall in n throws of a coin (H. A. David, Order Statistics, ch. 7). The times
between tokens of one answer are alike and say less than as many of different answers: n is divided by the design effect, by how
much more the share below the percentile varies from answer to answer than it would by chance (Kish, 1965; Woodruff, 1952).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
COUNT_MAX = 20_000
"""More values than these count as these: an interval is then narrower than any other doubt about a measurement."""


def interval(values: Sequence[np.ndarray], percent: float) -> tuple[float | None, float | None]:
    """The bounds of a percentile of all values (float64[n], one array for each independent request), in their unit. None where
    there are too few values for a bound, as above the 99th percentile of a hundred."""
    merged, share = np.sort(np.concatenate(values)), percent / 100
    count = min(int(len(merged) / design_effect(values, float(np.percentile(merged, percent)))), COUNT_MAX)
    low, high = ranks(count, share)
    places = (np.ceil(np.array([low, high]) / count * len(merged)).astype(int) - 1).tolist()
    return float(merged[places[0]]) if low >= 1 else None, float(merged[places[1]]) if high <= count else None


def design_effect(values: Sequence[np.ndarray], at: float) -> float:
    """By how much more the share of values up to `at` varies from request to request than that of independent ones; at least 1."""
    sizes = np.array([len(each) for each in values])
    below = np.array([np.count_nonzero(each <= at) for each in values])
    count, share = sizes.sum(), below.sum() / sizes.sum()
    if len(values) < 2 or not 0 < share < 1:
        return 1.0
    varied = np.square(below - share * sizes).sum() / count**2 * len(values) / (len(values) - 1)
    return max(1.0, min(float(varied / (share * (1 - share) / count)), float(sizes.mean())))


def ranks(count: int, share: float) -> tuple[int, int]:
    """The ranks, from 1, of the order statistics around the share; 0 and count + 1 where there is none."""
    if not 0 < share < 1 or count < 1:
        return 0, count + 1
    heads = np.arange(count + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    chances = factorials[count] - factorials - factorials[::-1] + heads * np.log(share) + (count - heads) * np.log(1 - share)
    up_to = np.cumsum(np.exp(chances))
    outside = (1 - CONFIDENCE) / 2
    return int(np.searchsorted(up_to, outside, side="right")), int(np.searchsorted(up_to, 1 - outside)) + 1
