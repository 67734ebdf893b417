"""Rounding: a weight in floats to numbers of few bits with the scales that lose least. The same input gives the same bits."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

SHARES = tuple(1 - step / 32 for step in range(10))
"""Of the largest number of a group: what its scale may hold, others being cut off."""
TOGETHER = 2**17
"""Numbers that are rounded at a time: those that stay in a core's cache."""
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = np.float32(ml_dtypes.finfo(FLOAT8).max)


class Rounded(NamedTuple):
    """`numbers` [out, in] times `scales` [out, groups]; `error` is the sum of the squares of what was lost."""

    numbers: np.ndarray
    scales: np.ndarray
    error: float


def to_integers(weight: np.ndarray, bits: int, group: int, dtype: np.dtype, columns: np.ndarray | None = None) -> Rounded:
    """weight float32 [out, in], finite, in whole groups -> int8 numbers of so many bits, and scales of `dtype`.

    Of some scales for each group the one with the least sum of squared errors counts, and then the best one for its numbers. An
    error counts sqrt(x^2 + 2 m) times for a number x of a group whose mean square is m, as large numbers matter more, or as often
    as `columns` float32 [in] say. In 8 bits the largest number's scale is the best, by less than a thousandth; in fewer a scale may
    be below zero."""
    rows = max(1, TOGETHER // weight.shape[1])
    parts = [_integers(weight[row : row + rows], bits, group, dtype, columns) for row in range(0, len(weight), rows)]
    numbers, scales = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    return Rounded(numbers, scales, sum(part.error for part in parts))


def to_float8(weight: np.ndarray, dtype: np.dtype) -> Rounded:
    """weight float32 [out, in], finite -> E4M3 numbers, and a scale of `dtype` for each output."""
    scales = (np.abs(weight).max(1, keepdims=True) / FLOAT8_MAX).astype(dtype)
    scales[scales == 0] = 1
    wide = scales.astype(np.float32)
    numbers = np.clip(weight / wide, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    return Rounded(numbers, scales, float(np.square(numbers.astype(np.float32) * wide - weight).sum(dtype=np.float64)))


def _integers(weight: np.ndarray, bits: int, group: int, dtype: np.dtype, columns: np.ndarray | None) -> Rounded:
    """Groups are columns here: operations on rows of them are several times as fast."""
    groups, half = np.ascontiguousarray(weight.reshape(-1, group).T), 2 ** (bits - 1)
    scales = np.abs(groups).max(0) / np.float32(half - 1)
    if bits < 8:  # there is one number more below zero than above: the largest one is there
        matters = weights_of(groups, None if columns is None else np.tile(columns.reshape(-1, group).T, len(weight)))
        scales = searched(groups, half, np.where(groups.max(0) > -groups.min(0), -scales, scales), dtype, matters)
    wide = _stored(scales, dtype)
    numbers = np.clip(np.rint(groups / wide), -half, half - 1)
    lost = np.ascontiguousarray((numbers * wide - groups).T)
    whole = np.ascontiguousarray(numbers.T, np.int8).reshape(weight.shape)
    return Rounded(whole, wide.astype(dtype).reshape(len(weight), -1), float(np.square(lost).sum(dtype=np.float64)))


def weights_of(groups: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """How often an error counts in `groups` [inputs, groups], as to_integers says: `counts` where they are given."""
    if counts is not None:
        return counts
    squares = np.square(groups)
    found: np.ndarray = np.sqrt(squares + 2 * (sum_of(squares) / np.float32(len(groups))))
    return found


def searched(groups: np.ndarray, half: int, largest: np.ndarray, dtype: np.dtype, matters: np.ndarray) -> np.ndarray:
    """The best scales of `groups` [inputs, groups], whose largest numbers have the scales `largest`. `matters`, of the same shape:
    how often an error counts."""
    work = np.empty_like(groups)

    def rounded(wide: np.ndarray) -> np.ndarray:
        np.rint(np.divide(groups, wide, out=work), out=work)
        return np.clip(work, -half, half - 1, out=work)

    def better(first: tuple[np.ndarray, np.ndarray], scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each group the scale with the smaller error, the first of equal ones, and that error."""
        wide = _stored(scales, dtype)
        lost = np.subtract(np.multiply(rounded(wide), wide, out=work), groups, out=work)
        errors = sum_of(np.multiply(matters, np.square(lost, out=work), out=work))
        is_less = errors < first[1]
        return np.where(is_less, wide, first[0]), np.where(is_less, errors, first[1])

    best = largest, np.full(largest.shape, np.inf, np.float32)
    for share in SHARES:
        best = better(best, largest * np.float32(share))
    numbers = rounded(best[0])
    counted = matters * numbers
    whole = sum_of(matters * np.square(numbers))
    return better(best, sum_of(counted * groups) / np.where(whole > 0, whole, np.float32(1)))[0]


def _stored(scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales as `dtype` has them, 1 for zero."""
    kept = scales.astype(dtype)
    return np.where(kept != 0, kept, np.ones((), dtype)).astype(np.float32)


def sum_of(columns: np.ndarray) -> np.ndarray:
    """The sum of each column [a multiple of 8]: eight sums of each eighth number, and theirs."""
    parts = columns.reshape(-1, 8, columns.shape[1])
    eight = parts[0].copy()
    for part in parts[1:]:
        eight += part
    four = eight[0::2] + eight[1::2]
    total: np.ndarray = (four[0] + four[1]) + (four[2] + four[3])
    return total
