"""Forms of a weight beside the plain tensor, in plain torch: whole numbers with scales, products in float32, products of
one shape.

Owns the rounding to int8, which is the same for every implementation, and the plain products and rows that compiled
kernels are held to. Weights are rounded, activations are not: they are bfloat16. An int8 product is summed over whole
weights in float32, scaled once and rounded once, so the only freedom of an implementation is the order of its sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from vnext.kernels.shards import joined

LARGEST = 127
ACTIVATIONS = torch.bfloat16
FIXED_ROWS = 64
"""Rows of a product of one shape: of one tile on a GPU, so that a library's kernel, which is chosen by the shape, treats
all rows of it alike."""


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


class WideWeight(NamedTuple):
    """A weight [..., out, in] of any float dtype that is multiplied in float32. An index picks one expert."""

    weight: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __getitem__(self, expert: int) -> WideWeight:
        return WideWeight(self.weight[expert])


class FixedWeight(NamedTuple):
    """A weight [..., out, in] that is always multiplied by FIXED_ROWS rows: a row's product does not show how many others
    there are. An index picks one expert."""

    weight: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __getitem__(self, expert: int) -> FixedWeight:
        return FixedWeight(self.weight[expert])


class CutWeight(NamedTuple):
    """A weight in shards, [..., out, in / n] each and of one form, whose products are added. An index picks one expert."""

    pieces: tuple[Weight, ...]

    @property
    def shape(self) -> torch.Size:
        *outer, inputs = self.pieces[0].shape
        return torch.Size((*outer, inputs * self.shards))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def shards(self) -> int:
        return len(self.pieces)

    def __getitem__(self, expert: int) -> CutWeight:
        return CutWeight(tuple(piece[expert] for piece in self.pieces))


Weight = torch.Tensor | Int8Weight | WideWeight | FixedWeight | CutWeight


def formed(weight: torch.Tensor, form: str, shards: int = 1) -> Weight:
    """A weight [..., out, in] as "plain", "int8", "wide" or "fixed", its inputs in so many shards."""
    if shards > 1:
        return CutWeight(tuple(formed(piece.contiguous(), form) for piece in weight.chunk(shards, -1)))
    if form == "int8":
        return quantize(weight)
    if form == "fixed":
        return FixedWeight(weight)
    return WideWeight(weight) if form == "wide" else weight


def quantize(weight: torch.Tensor) -> Int8Weight:
    """weight [..., out, in], finite, of any float dtype: round(w / s), halves to even, s = largest |w| of the output / 127.

    An output of zeros, or one so small that its s would be zero, has s = 1.
    """
    wide = weight.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    values = (wide / scales.unsqueeze(-1)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Weight(values.to(torch.int8), scales)


def sums(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [T, in] times weight [out, in] -> [T, out]: in x's dtype by a plain or a fixed weight, else in float32."""
    if isinstance(weight, CutWeight):
        return joined([sums(part, piece).float() for part, piece in zip(x.chunk(weight.shards, 1), weight.pieces)])
    if isinstance(weight, Int8Weight):
        return functional.linear(x.float(), weight.values.float()).mul_(weight.scales)
    if isinstance(weight, WideWeight):
        return functional.linear(x.float(), weight.weight.float())
    return fixed_sums(x, weight.weight) if isinstance(weight, FixedWeight) else functional.linear(x, weight)


def fixed_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] times weight [out, in] by products of FIXED_ROWS rows, the last ones padded with zeros."""
    count = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -count % FIXED_ROWS))
    products = [functional.linear(part, weight) for part in padded.split(FIXED_ROWS)] if count else []
    return torch.cat(products)[:count] if products else x.new_empty((0, weight.shape[0]))


def rows(table: Int8Weight | WideWeight | FixedWeight | torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [N] of table [V, H] -> [N, H] of its dtype; those of whole numbers are scaled and rounded."""
    if isinstance(table, Int8Weight):
        scales = table.scales.index_select(0, ids).unsqueeze(1)
        return table.values.index_select(0, ids).float().mul_(scales).to(ACTIVATIONS)
    return (table.weight if isinstance(table, WideWeight | FixedWeight) else table).index_select(0, ids)
