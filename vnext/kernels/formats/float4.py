"""Floats of 4 bits, two in a byte, the lower one first, with a scale for each group of inputs: NVFP4 and MXFP4.

    weight_packed, weight_scale E4M3, weight_global_scale, which divides it       compressed-tensors' nvfp4-pack-quantized
    weight, weight_scale E4M3, weight_scale_2, which multiplies it                ModelOpt's NVFP4
    weight_packed, weight_scale E8M0                                              compressed-tensors' mxfp4-pack-quantized
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.kernels.codes import Codes
from vnext.kernels.format import Cut, Format, Shape, StoredTensors
from vnext.kernels.formats.bits import EXPONENTS, FLOAT4, floats_of, nibbles
from vnext.kernels.formats.scales import FLOATS, Grid, Stored, coded, has, require, scaled


class Suffixes(NamedTuple):
    """Of the tensors of one kind, `scales` their dtypes. `whole`: of a scale of the tensor, if there is one."""

    numbers: str
    scales: tuple[str, ...]
    whole: str = ""
    is_divided: bool = False


KINDS = (
    Suffixes("weight_packed", ("F8_E4M3",), "weight_global_scale", is_divided=True),
    Suffixes("weight", ("F8_E4M3",), "weight_scale_2"),
    Suffixes("weight_packed", ("U8", "F8_E8M0")),
)
SCALE = "weight_scale"
ZERO = 12
TWICE = (2 * FLOAT4 + ZERO).astype(np.uint8)


class Float4(Stored):
    """`whole_shape`: of the tensor's scale in its file."""

    name = "float4"
    has_codes = True

    def __init__(self, kind: Suffixes, group: int, whole_shape: Shape) -> None:
        self.suffixes = (kind.numbers, SCALE, *filter(None, (kind.whole,)))
        self.grid, self._is_divided, self._whole_shape = Grid(1, group), kind.is_divided, whole_shape
        self.group = self.grid.unit

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        stem = weight.removesuffix("weight")
        for kind in KINDS:
            if tensors.stored_dtype(stem + kind.numbers) != "U8" or tensors.stored_dtype(stem + SCALE) not in kind.scales:
                continue
            (_, size), (_, groups) = require(tensors, weight, {kind.numbers: ("U8",), SCALE: kind.scales})
            if 2 * size % groups:
                raise ValueError(f"{2 * size} inputs are no {groups} whole groups")
            whole = tensors.shape(stem + kind.whole) or () if kind.whole else ()
            if kind.whole:
                require(tensors, weight, {kind.whole: FLOATS}, len(whole))
            return Float4(kind, 2 * size // groups, whole)
        if tensors.stored_dtype(stem + "weight_packed") == "U8" and not has(tensors, weight, SCALE):
            raise ValueError(f"there is no tensor '{stem}{SCALE}'; download the model again")
        return None

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        if shape[1] % 2:
            raise ValueError(f"{shape[1]} inputs are no whole bytes of 2")
        if self._whole_shape not in ((), (1,)):
            raise ValueError(f"it has {list(self._whole_shape)} scales of the tensor where there is one")
        return ((shape[0], shape[1] // 2), self.grid.shape(shape), self._whole_shape)[: len(self.suffixes)]

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if columns.start % 2 or columns.stop % 2:
            raise ValueError(f"inputs {columns.start} to {columns.stop} cut a byte of 2")
        cuts = (rows, slice(columns.start // 2, columns.stop // 2)), self.grid.cut(rows, columns), ()
        return cuts[: len(self.suffixes)]

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        packed, scales = self._numbers(part)
        return scaled(FLOAT4[packed], scales)

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        """Twice the numbers are whole."""
        packed, scales = self._numbers(part)
        return coded(TWICE[packed], 5, scales / np.float32(2), ZERO)

    def _numbers(self, part: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Places in FLOAT4, and scales in float32."""
        packed, scales, *whole = part
        floats = EXPONENTS[scales.view(np.uint8)] if not whole else floats_of(scales)
        if whole:
            factor = floats_of(whole[0]).reshape(())
            with np.errstate(divide="ignore", invalid="ignore"):
                floats = floats / factor if self._is_divided else floats * factor
        return nibbles(packed), floats


FLOAT4_FORMAT = Float4(KINDS[0], 16, (1,))
