"""Paced fit: what steps cost on a machine that is slow at times.

Owns the least squares behind the model of step times, and the windows of time that each have their own pace. While a
machine is slow a queue grows and steps get larger, so a fit that treats all steps alike mistakes slowness for the cost
of size. Steps are therefore compared within their window. Differences between whole windows count less (BETWEEN) and
decide only what no window shows. The initial paces come from a model with one slope per feature, which cannot mistake a
slow window for a knee.
"""

from __future__ import annotations

import numpy as np

WINDOW_US = 100_000.0
WINDOW_STEPS = 32
"""A window lasts at least this long, and has at least this many steps."""
BETWEEN = 0.3
ROUNDS = 8
GAIN_MIN = 1e-9
"""A weight that gains less stays at zero."""
LEAST_SHARE = 0.02
"""During the fit a step counts as taking at least this share of the usual time."""


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
