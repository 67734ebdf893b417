"""Floats: weights as the checkpoint has them, in the model's dtype. Three kinds differ in how plain torch multiplies; CODES
is PLAIN beside weights that stay in the codes of their files.

PLAIN multiplies in the dtype. WIDE multiplies in float32, where one code path of MKL is the same for any number of rows. FIXED
always multiplies FIXED_ROWS rows, so that a GPU's library, which chooses the order of a sum by the shape, has one order. The CPU's
kernels pack all three alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.format import Cut, Format, PlainWeight, Shape

if TYPE_CHECKING:
    import numpy as np
    import torch

FIXED_ROWS = 64
"""Rows of a product of one shape: of one tile on a GPU, so that a library's kernel, which is chosen by the shape, treats
all rows of it alike."""
PANELS = ("float32", "bfloat16")


class WideWeight(NamedTuple):
    """A weight [..., out, in] of any float dtype that is multiplied in float32. An index picks one expert."""

    weight: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __getitem__(self, expert: int) -> WideWeight:  # type: ignore[override]  # of experts, not of fields
        return WideWeight(self.weight[expert])

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> float32 [T, out]."""
        return x.float().matmul(self.weight.float().t())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in]."""
        return self.weight.index_select(0, ids)


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

    def __getitem__(self, expert: int) -> FixedWeight:  # type: ignore[override]  # of experts, not of fields
        return FixedWeight(self.weight[expert])

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] times the weight -> [T, out] of x's dtype, by products of FIXED_ROWS rows, the last ones padded with zeros."""
        count = x.shape[0]
        padded = x.new_zeros((count + -count % FIXED_ROWS, x.shape[1]))
        padded[:count] = x
        products = padded.new_empty((len(padded), self.weight.shape[0]))
        for first in range(0, len(padded), FIXED_ROWS):
            products[first : first + FIXED_ROWS] = padded[first : first + FIXED_ROWS].matmul(self.weight.t())
        return products[:count]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [N] of the weight -> [N, in]."""
        return self.weight.index_select(0, ids)


class Floats(Format):
    """Floats in the model's dtype; `weight`: what plain torch multiplies by."""

    def __init__(self, name: str, weight: type[WideWeight] | type[FixedWeight] | None = None, keeps_codes: bool = False) -> None:
        self.name, self.keeps_codes = name, keeps_codes
        self._weight = weight

    def panels(self, dtype: str) -> str:
        return dtype if dtype in PANELS else ""

    def formed(self, weight: torch.Tensor) -> PlainWeight | torch.Tensor:
        return weight if self._weight is None else self._weight(weight)


class Flipped(Format):
    """Floats that a checkpoint has as [in, out], for formats that are rounded from them."""

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape[::-1],)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        return ((columns, rows),)

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        return part[0].T


PLAIN, WIDE, FIXED = Floats("plain"), Floats("wide", WideWeight), Floats("fixed", FixedWeight)
FLIPPED = Flipped()
CODES = Floats("codes", keeps_codes=True)
