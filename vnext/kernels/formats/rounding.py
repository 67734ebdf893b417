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


def to_integers(weight: np.ndarray, bits: int, group: int, dtype: np.dtype) -> Rounded:
    """weight float32 [out, in], finite, in whole groups -> int8 numbers of so many bits, and scales of `dtype`.

    Of some scales for each group the one with the least sum of squared errors counts, and then the best one for its numbers. An
    error counts sqrt(x^2 + 2 m) times for a number x of a group whose mean square is m: large numbers matter more. In 8 bits the
    largest number's scale is the best, by less than a thousandth; in fewer a scale may be below zero."""
    rows = max(1, TOGETHER // weight.shape[1])
    parts = [_integers(weight[row : row + rows], bits, group, dtype) for row in range(0, len(weight), rows)]
    numbers, scales = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
    return Rounded(numbers, scales, sum(part.error for part in parts))


def to_float8(weight: np.ndarray, dtype: np.dtype) -> Rounded:
    """weight float32 [out, in], finite -> E4M3 numbers, and a scale of `dtype` for each output."""
    scales = (np.abs(weight).max(1, keepdims=True) / FLOAT8_MAX).astype(dtype)
    scales[scales == 0] = 1
    wide = scales.astype(np.float32)
    numbers = np.clip(weight / wide, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    return Rounded(numbers, scales, float(np.square(numbers.astype(np.float32) * wide - weight).sum(dtype=np.float64)))


def _integers(weight: np.ndarray, bits: int, group: int, dtype: np.dtype) -> Rounded:
    groups, half = weight.reshape(len(weight), -1, group), 2 ** (bits - 1)
    largest = np.abs(groups).max(-1) / np.float32(half - 1)
    if bits < 8:  # there is one number more below zero than above: the largest one is there
        largest = np.where(groups.max(-1) > -groups.min(-1), -largest, largest)

    def tried(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(numbers, scales, errors) of each group with these scales, rounded to `dtype`."""
        scales = scales.astype(dtype)
        wide = np.where(scales != 0, scales, np.ones((), dtype)).astype(np.float32)[..., None]
        numbers = np.clip(np.rint(groups / wide), -half, half - 1)
        return numbers, wide[..., 0], (matters * np.square(numbers * wide - groups)).sum(-1)

    squares = np.square(groups)
    matters = np.sqrt(squares + 2 * squares.mean(-1, keepdims=True))
    best = tried(largest)
    if bits == 8:
        return _rounded(weight, best, dtype)
    for share in SHARES[1:]:
        best = _better(best, tried(largest * np.float32(share)))
    whole = (matters * np.square(best[0])).sum(-1)
    fitted = (matters * best[0] * groups).sum(-1) / np.where(whole > 0, whole, np.float32(1))
    return _rounded(weight, _better(best, tried(fitted)), dtype)


def _rounded(weight: np.ndarray, found: tuple[np.ndarray, ...], dtype: np.dtype) -> Rounded:
    numbers, scales, _ = found
    lost = (numbers * scales[..., None]).reshape(weight.shape) - weight
    return Rounded(
        numbers.reshape(weight.shape).astype(np.int8), scales.astype(dtype), float(np.square(lost).sum(dtype=np.float64))
    )


def _better(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each group the one with the smaller error, the first of equal ones."""
    is_less = second[2] < first[2]
    return (
        np.where(is_less[..., None], second[0], first[0]), np.where(is_less, second[1], first[1]),
        np.where(is_less, second[2], first[2]),
    )  # fmt: skip
