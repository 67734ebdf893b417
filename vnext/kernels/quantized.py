"""Weights as whole numbers: int8 with one scale for each output, in plain torch.

Owns the rounding, which is the same for every implementation, and the plain product and rows that compiled kernels are
held to. Weights are rounded, activations are not: they are bfloat16. A product is summed over whole weights in float32,
scaled once and rounded once, so the only freedom that an implementation has is the order of its sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

LARGEST = 127
ACTIVATIONS = torch.bfloat16


class Int8Weight(NamedTuple):
    """values int8 [..., out, in] times scales float32 [..., out]. An index picks one expert of [E, out, in]."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, as contracts ask it of every weight."""
        return ACTIVATIONS

    def __getitem__(self, expert: int) -> Int8Weight:
        return Int8Weight(self.values[expert], self.scales[expert])


def quantize(weight: torch.Tensor) -> Int8Weight:
    """weight [..., out, in], finite, of any float dtype: round(w / s), halves to even, s = largest |w| of the output / 127.

    An output of zeros, or one so small that its s would be zero, has s = 1.
    """
    wide = weight.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    values = (wide / scales.unsqueeze(-1)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Weight(values.to(torch.int8), scales)


def product(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """x bfloat16 [T, in] times weight [out, in] -> float32 [T, out]."""
    return functional.linear(x.float(), weight.values.float()).mul_(weight.scales)


def rows_of(table: Int8Weight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [N] of table [V, H] -> bfloat16 [N, H]."""
    scales = table.scales.index_select(0, ids).unsqueeze(1)
    return table.values.index_select(0, ids).float().mul_(scales).to(ACTIVATIONS)
