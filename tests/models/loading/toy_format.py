"""A toy format of weights: 8 bits with a float32 scale for each group of 16 inputs. All that a format needs, in one file.

Checkpoints may hold it, as `<name>.qweight` and `<name>.group_scales`, and weights may be rounded to it at loading.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.format import Cut, Format, FormatRow, Shape

GROUP, LARGEST = 16, 127
ROW = FormatRow("toy8", "toy_format:TOY8", option="toy8 keeps 8 bits with a scale for 16 inputs", is_stored=True)


class ToyWeight(NamedTuple):
    """values int8 [..., out, in] times scales float32 [..., out, in / GROUP]."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getitem__(self, expert: int) -> ToyWeight:
        return ToyWeight(self.values[expert], self.scales[expert])

    def floats(self) -> torch.Tensor:
        return self.values * self.scales.repeat_interleave(GROUP, -1)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().matmul(self.floats().t())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.floats()[ids]


class Toy8(Format):
    name = "toy8"
    dtypes = ("I8", "F32")
    group = GROUP
    needs_finite = True

    def tensors(self, weight: str) -> tuple[str, ...]:
        stem = weight.removesuffix("weight")
        return (f"{stem}qweight", f"{stem}group_scales")

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        if inputs % GROUP:
            raise ValueError(f"{inputs} inputs are no whole groups of {GROUP}")
        return shape, (outputs, inputs // GROUP)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if columns.start % GROUP or columns.stop % GROUP:
            raise ValueError(f"inputs {columns.start} to {columns.stop} cut a group of {GROUP}")
        return (rows, columns), (rows, slice(columns.start // GROUP, columns.stop // GROUP))

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        values, scales = part
        return values * np.repeat(scales, GROUP, 1)

    def source(self, stored: object, dtype: str) -> str:
        return "float32"

    def formed(self, weight: torch.Tensor) -> ToyWeight:
        groups = weight.unflatten(-1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / LARGEST).clamp(min=1e-30)
        return ToyWeight((groups / scales.unsqueeze(-1)).round().flatten(-2).char(), scales)


TOY8 = Toy8()
