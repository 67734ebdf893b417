"""Rounded: weights of floats that become codes of few bits as they are loaded, by what --quantization says.

The numbers are those that `vnext quantize` writes of a checkpoint in bfloat16 with such groups. On a CPU they stay codes.
"""

from __future__ import annotations

from math import lcm

import ml_dtypes
import numpy as np

from vnext.kernels.codes import INPUTS, Codes, FloatRows
from vnext.kernels.format import Cut, Format, Shape
from vnext.kernels.formats.bits import unsigned
from vnext.kernels.formats.floats import Floats
from vnext.kernels.formats.rounding import to_integers
from vnext.kernels.formats.scales import coded

SCALES = np.dtype(ml_dtypes.bfloat16)


class Rounded(Format):
    """A weight that a checkpoint has as `held` says, as if it had codes of so many bits in groups of so many inputs."""

    has_codes = True
    has_one_form = True

    def __init__(self, name: str, bits: int, group: int, held: Format) -> None:
        self.name, self.group = name, lcm(group, held.group)
        self._bits, self._own, self._held = bits, group, held

    def tensors(self, weight: str) -> tuple[str, ...]:
        return self._held.tensors(weight)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return self._held.shapes(shape)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        return self._held.slices(rows, columns)

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        return self.codes(part).floats()

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        rounded = to_integers(self._floats(part), self._bits, self._own, SCALES)
        return coded(unsigned(rounded.numbers, self._bits), self._bits, rounded.scales, 2 ** (self._bits - 1))

    def rows(self, part: tuple[np.ndarray, ...]) -> FloatRows | None:
        if self._own != INPUTS:
            return None
        weight = self._held.to_float(part)
        return FloatRows(weight if weight.dtype == SCALES else weight.astype(np.float32, copy=False), self._bits)

    def _floats(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        weight = self._held.to_float(part).astype(np.float32)
        if not np.isfinite(weight).all():
            raise ValueError("it has weights that are not finite, which cannot be quantised")
        return weight


class Int8(Floats):
    """Every weight of products, the head too: in groups of INPUTS, or all inputs of a shard where those divide none."""

    def __init__(self) -> None:
        super().__init__("int8", keeps_codes=True)

    def rounds(self, held: Format, inputs: int, run: int, takes_few: bool) -> Format | None:
        return Rounded(self.name, 8, run if run % INPUTS else INPUTS, held)


class Int4(Floats):
    """4 bits for weights that take few and are whole groups of INPUTS, INT8's for others: a head reads as many bytes as some
    layers, and SmolLM2's values, a thirtieth of a layer, lose a third of what it loses. Groups of 64 made it diverge 1.4 times as
    far as Q4_0."""

    def __init__(self) -> None:
        super().__init__("int4", keeps_codes=True)

    def rounds(self, held: Format, inputs: int, run: int, takes_few: bool) -> Format | None:
        if inputs % INPUTS == 0 and takes_few:
            return Rounded(self.name, 4, INPUTS, held)
        return INT8.rounds(held, inputs, run, takes_few)


INT8, INT4 = Int8(), Int4()
