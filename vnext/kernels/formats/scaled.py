"""Numbers of 8 bits with scales: whole numbers and floats, in every place that checkpoints have them.

    weight I8 or F8, weight_scale of the tensor, of each output, of groups or of blocks        compressed-tensors, FP8, ModelOpt
    weight F8, weight_scale_inv of blocks of `weight_block_size`, by which it is multiplied     DeepSeek's and Qwen's FP8
    weight I8, SCB [out], 127 times the scale                                                  bitsandbytes
    _weight_qdata, _weight_scale, _weight_zero_point                                           torchao
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.kernels.codes import Codes
from vnext.kernels.format import Cut, Format, Settings, Shape, StoredTensors
from vnext.kernels.formats.bits import EXPONENTS, floats_of, unsigned
from vnext.kernels.formats.scales import FLOATS, Grid, Stored, coded, has, require, scaled

EIGHT = ("I8", "F8_E4M3", "F8_E5M2")
SCALES = (*FLOATS, "U8", "F8_E8M0")
ZEROS = ("I8", "I32", "I64")
USUAL_BLOCK = (128, 128)
HALF = 128
"""What makes a code of a number of int8."""


class Suffixes(NamedTuple):
    """Of the tensors of one kind. `zero` and `kind` may be missing; a `kind` says how numbers lie, 0 for row by row."""

    numbers: str
    scale: str
    zero: str = ""
    kind: str = ""
    part_of_scale: float = 1.0


KINDS = (
    Suffixes("weight", "weight_scale_inv"),
    Suffixes("weight", "weight_scale", "weight_zero_point"),
    Suffixes("weight", "SCB", "", "weight_format", 1 / 127),
    Suffixes("_weight_qdata", "_weight_scale", "_weight_zero_point"),
)


def block_of(settings: Settings) -> tuple[int, int]:
    """Outputs and inputs of a block, as FP8's or compressed-tensors' settings say."""
    groups = settings.get("config_groups")
    schemes = [each.get("weights") or {} for each in groups.values()] if isinstance(groups, dict) else []
    for block in (settings.get("weight_block_size"), *(each.get("block_structure") for each in schemes)):
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return USUAL_BLOCK


def grid_of(shape: Shape, scales: Shape, settings: Settings) -> Grid:
    """What shares a scale, by the shapes of numbers and scales. Raises ValueError."""
    outputs, inputs = shape
    rows, groups = scales
    if scales == (1, 1):
        return Grid(outputs, inputs)
    block = block_of(settings)
    for grid in (Grid(1, inputs // groups), Grid(*block)):
        if grid.group and grid.shape(shape) == scales and (grid.rows > 1 or inputs % groups == 0):
            return grid
    blocks = f"blocks of {block[0]} x {block[1]}"
    raise ValueError(f"{rows} x {groups} scales do not fit {outputs} outputs and {inputs} inputs in {blocks}")


class Scaled(Stored):
    """`scale_shape`: as the file has it, of the whole weight."""

    name = "scaled"

    def __init__(self, kind: Suffixes, grid: Grid, scale_shape: Shape) -> None:
        self.suffixes = (kind.numbers, kind.scale, *filter(None, (kind.zero,)))
        self.grid, self._factor, self._scale_shape = grid, kind.part_of_scale, scale_shape
        self.group = grid.unit

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        stem = weight.removesuffix("weight")
        numbers = [kind.numbers for kind in KINDS if tensors.stored_dtype(stem + kind.numbers) in EIGHT]
        if not numbers or stem == weight:
            return None
        kind = next((each for each in KINDS if each.numbers == numbers[0] and has(tensors, weight, each.scale)), None)
        if kind is None:
            raise ValueError(f"there is no scale of {stem + numbers[0]!r}, as {stem}weight_scale; download the model again")
        if kind.kind and has(tensors, weight, kind.kind) and np.any(tensors.values(stem + kind.kind)):
            raise ValueError(f"{stem + kind.kind!r} names an order for one GPU; save the model with a newer bitsandbytes")
        (shape,) = require(tensors, weight, {kind.numbers: EIGHT})
        scales = tensors.shape(stem + kind.scale) or ()
        (scales,) = require(tensors, weight, {kind.scale: SCALES}, len(scales))
        wide = (1, 1) if scales in ((), (1,)) else (*scales, 1)[:2]
        zero = kind.zero if kind.zero and has(tensors, weight, kind.zero) else ""
        if zero:
            require(tensors, weight, {zero: ZEROS}, len(scales))
        found = Scaled(kind._replace(zero=zero), grid_of(shape, wide, tensors.settings), scales)
        found.has_codes = tensors.stored_dtype(stem + kind.numbers) == "I8"
        return found

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        scales = self.grid.shape(shape)
        same = self._scale_shape if (*self._scale_shape, 1, 1)[:2] == scales else scales
        return (shape, *(same for _ in self.suffixes[1:]))

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if self._scale_shape in ((), (1,), (1, 1)):
            return (rows, columns), *(() for _ in self.suffixes[1:])
        cut = self.grid.cut(rows, columns)[: len(self._scale_shape)]
        return (rows, columns), *(cut for _ in self.suffixes[1:])

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        numbers, scales, zeros = self._numbers(part)
        return scaled(floats_of(numbers), scales, zeros)

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        numbers, scales, zeros = self._numbers(part)
        return coded(unsigned(numbers, 8), 8, scales, zeros + HALF)

    def _numbers(self, part: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
        """Numbers, scales in float32, and zeros, each with two axes."""
        numbers, *rest = part
        scales, *zeros = (each.reshape((1, 1) if each.size == 1 else (len(each), -1)) for each in rest)
        floats = EXPONENTS[scales] if scales.dtype == np.uint8 else floats_of(scales)
        return numbers, floats * np.float32(self._factor), zeros[0].astype(np.int32) if zeros else 0


SCALED = Scaled(KINDS[0], Grid(*USUAL_BLOCK), (1, 1))
