"""Int8: whole numbers with one scale for each output, rounded as a weight is loaded.

Owns the rounding, which is the same for every implementation, and the plain products and rows that compiled kernels are held to.
Weights are rounded, activations are not: they are bfloat16. A product is summed over whole weights in float32, scaled once and
rounded once, so the only freedom of an implementation is the order of its sum. Where ranks share the inputs, each shard of them has
scales of its own, because it is a weight of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.format import Format

if TYPE_CHECKING:
    import torch

LARGEST = 127
ACTIVATIONS = "bfloat16"
SOURCES = ("float32", "bfloat16")


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
        return torch_dtype(ACTIVATIONS)

    def __getitem__(self, expert: int) -> Int8Weight:
        return Int8Weight(self.values[expert], self.scales[expert])

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> float32 [T, out]."""
        return x.float().matmul(self.values.float().t()).mul_(self.scales)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in], scaled and rounded to bfloat16."""
        scales = self.scales.index_select(0, ids).unsqueeze(1)
        return self.values.index_select(0, ids).float().mul_(scales).bfloat16()


def quantize(weight: torch.Tensor) -> Int8Weight:
    """weight [..., out, in], finite, of any float dtype: round(w / s), halves to even, s = largest |w| of the output / 127.

    An output of zeros, or one so small that its s would be zero, has s = 1.
    """
    wide = weight.float()
    scales = wide.abs().amax(-1) / LARGEST
    scales = scales.masked_fill(scales <= 0, 1.0)
    values = (wide / scales.unsqueeze(-1)).round_().clamp_(-LARGEST, LARGEST)
    return Int8Weight(values.char(), scales)


class Int8(Format):
    """The format, whose one object is INT8."""

    name = "int8"
    needs_finite = True

    def activations(self, dtype: str) -> str:
        return ACTIVATIONS

    def source(self, stored: Iterable[str], dtype: str) -> str:
        """It rounds once, from the checkpoint's own numbers, all of which float32 holds."""
        return ACTIVATIONS if set(stored) == {ACTIVATIONS} else "float32"

    def panels(self, dtype: str) -> str:
        return "int8" if dtype in SOURCES else ""

    def formed(self, weight: torch.Tensor) -> Int8Weight:
        return quantize(weight)


INT8 = Int8()
