"""Measures how far two results of one operation are apart, row by row."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    """A part of two results, [rows, ...] of one shape: the computed value and the one to compare with."""

    part: str
    ours: torch.Tensor
    theirs: torch.Tensor


class Gap(NamedTuple):
    """`relative` is to the largest magnitude in the row; `rows` are those that differ by more than the tolerance."""

    part: str
    absolute: float
    relative: float
    elements: int
    rows: tuple[int, ...]


def gap(pair: Pair, tolerance: float) -> Gap:
    """With a tolerance of 0 every bit counts except the sign of zero; NaNs equal each other."""
    rows = pair.ours.shape[0]
    if not pair.ours.numel():
        return Gap(pair.part, 0.0, 0.0, 0, ())
    ours, theirs = pair.ours.reshape(rows, -1).float(), pair.theirs.reshape(rows, -1).float()
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(equal, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
    scale = theirs.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)
    largest = apart.amax(1)
    relative = torch.where(largest > 0, largest / scale.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    wrong = (~equal).any(1) if tolerance == 0 else relative > tolerance
    return Gap(
        part=pair.part, absolute=_finite(largest.max()), relative=_finite(relative.max()),
        elements=int((~equal).sum()), rows=tuple(wrong.nonzero()[:, 0].tolist()),
    )  # fmt: skip


def parts_of(result: Any) -> tuple[torch.Tensor, ...]:
    """A result as a tuple of tensors."""
    return result if isinstance(result, tuple) else (result,)


def _finite(value: torch.Tensor) -> float:
    """A value that JSON can hold."""
    return min(float(value), sys.float_info.max)
