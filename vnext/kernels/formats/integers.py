"""Integers of few bits in words, with a scale and a zero for each group of inputs: AWQ, GPTQ and pack-quantized.

    AWQ          qweight [in, out / 8] in an order of its own, qzeros alike, scales [groups, out]
    GPTQ         qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], one less than the zero unless gptq_v2
    packed       weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point [out * bits / 32, groups], as
                 compressed-tensors names them
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from vnext.kernels.codes import Codes
from vnext.kernels.format import Cut, Format, Shape, StoredTensors
from vnext.kernels.formats.bits import WORD, from_words, ones, turned_from_awq, word_count, word_slice
from vnext.kernels.formats.scales import FLOATS, Grid, Stored, coded, has, order_of, require, scaled

WORDS = ("I32",)
BITS = range(2, 9)


class Numbers(NamedTuple):
    """codes uint8 [out, in]; scales [out, groups] of any float dtype; zeros uint8 [out, groups], or one for all."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int


class Integers(Stored):
    """`grid` and `bits`: of one weight. `zero`: of all its groups, None where they may differ."""

    zero: int | None = None

    def __init__(self, bits: int, grid: Grid) -> None:
        self.bits, self.grid = bits, grid
        self.has_codes = grid.order is None
        self.group = grid.unit

    @abstractmethod
    def numbers(self, part: tuple[np.ndarray, ...]) -> Numbers:
        """What such slices of `tensors` hold."""

    @abstractmethod
    def zeros(self, words: np.ndarray) -> np.ndarray:
        """uint8 [out, groups], from the tensor of zeros."""

    def knowing(self, words: np.ndarray) -> Integers:
        """The same, which knows the zero of all groups, if they have one in their tensor."""
        found = self.zeros(words)
        self.zero = int(found.flat[0]) if (found == found.flat[0]).all() else None
        return self

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        codes, scales, zeros = self.numbers(part)
        return scaled(codes, scales, zeros)

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        codes, scales, zeros = self.numbers(part)
        return coded(codes, self.bits, scales, zeros if self.zero is None else self.zero)


def grid_of(tensors: StoredTensors, weight: str, order: str, inputs: int, groups: int) -> Grid:
    """Groups by their number, or by the tensor `order` where there is one. Raises ValueError."""
    found = order_of(tensors, weight, order, groups, inputs)
    if found is None and inputs % groups:
        raise ValueError(f"{inputs} inputs are no {groups} whole groups")
    return Grid(1, -(-inputs // groups), found)


def bits_of(words: int, count: int, what: str) -> int:
    """Bits of each number, of which so many words hold `count`. Raises ValueError."""
    bits, rest = divmod(words * WORD, count)
    if rest or bits not in BITS:
        raise ValueError(f"{words} words for {count} {what} are not {BITS[0]} to {BITS[-1]} bits each")
    return bits


class Awq(Integers):
    """AutoAWQ's order "gemm", of 4 bits."""

    name = "awq"
    suffixes = ("qweight", "qzeros", "scales")

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        if tensors.settings.get("quant_method") != "awq" or not has(tensors, weight, "qweight"):
            return None
        words, zeros, scales = require(tensors, weight, {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS})
        if bits_of(zeros[1], scales[1], "outputs") != self.bits:
            raise ValueError(f"only {self.bits} bits are read")
        found = Awq(self.bits, grid_of(tensors, weight, "", words[0], scales[0]))
        return found.knowing(tensors.values(self.tensors(weight)[1]))

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        words, (_, groups) = word_count(outputs, self.bits, "outputs"), self.grid.shape(shape)
        return (inputs, words), (groups, words), (groups, outputs)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        words, (_, groups) = word_slice(rows, self.bits, "outputs"), self.grid.cut(rows, columns)
        return (columns, words), (groups, words), (groups, rows)

    def numbers(self, part: tuple[np.ndarray, ...]) -> Numbers:
        words, zeros, scales = part
        return Numbers(turned_from_awq(words), scales.T, self.zeros(zeros))

    def zeros(self, words: np.ndarray) -> np.ndarray:
        return turned_from_awq(words)


class Gptq(Integers):
    """`is_raised`: a stored zero is one less than the zero; writers subtract ones from whole words, where numbers fill them."""

    name = "gptq"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, bits: int, grid: Grid, is_raised: bool = True) -> None:
        super().__init__(bits, grid)
        self._is_raised = is_raised

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        settings = tensors.settings
        if settings.get("quant_method") != "gptq" or not has(tensors, weight, "qweight"):
            return None
        words, zeros, scales = require(tensors, weight, {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS})
        bits = bits_of(zeros[1], scales[1], "outputs")
        grid = grid_of(tensors, weight, "g_idx", words[0] * WORD // bits, scales[0])
        found = Gptq(bits, grid, settings.get("checkpoint_format") != "gptq_v2")
        return found.knowing(tensors.values(self.tensors(weight)[1]))

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        words, (_, groups) = word_count(outputs, self.bits, "outputs"), self.grid.shape(shape)
        return (word_count(inputs, self.bits, "inputs"), outputs), (groups, words), (groups, outputs)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        words, (_, groups) = word_slice(rows, self.bits, "outputs"), self.grid.cut(rows, columns)
        return (word_slice(columns, self.bits, "inputs"), rows), (groups, words), (groups, rows)

    def numbers(self, part: tuple[np.ndarray, ...]) -> Numbers:
        words, zeros, scales = part
        return Numbers(from_words(words.T, self.bits), scales.T, self.zeros(zeros))

    def zeros(self, words: np.ndarray) -> np.ndarray:
        if self._is_raised and WORD % self.bits == 0:
            words = (words.view(np.uint32) + ones(self.bits)).view(np.int32)
        found = from_words(words, self.bits).T
        return found + np.uint8(1) & np.uint8(2**self.bits - 1) if self._is_raised and WORD % self.bits else found


class Packed(Integers):
    """compressed-tensors' pack-quantized, whose numbers are signed; a zero is half the range where there is none."""

    name = "pack-quantized"
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale")

    def __init__(self, bits: int, grid: Grid, has_zeros: bool = False) -> None:
        super().__init__(bits, grid)
        if has_zeros:
            self.suffixes = (*Packed.suffixes, "weight_zero_point")

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        if tensors.stored_dtype(weight.removesuffix("weight") + "weight_packed") != "I32":
            return None
        words, scales = require(tensors, weight, {"weight_packed": WORDS, "weight_scale": FLOATS})
        require(tensors, weight, {"weight_shape": ("I64", "I32")}, 1)
        shape = tensors.values(weight.removesuffix("weight") + "weight_shape")
        if shape.shape != (2,) or shape.min() < 1:
            raise ValueError(f"its weight_shape is {shape.tolist()}; download the model again")
        bits = bits_of(words[1], int(shape[1]), "inputs")
        grid = grid_of(tensors, weight, "weight_g_idx", int(shape[1]), scales[1])
        return Packed(bits, grid, has(tensors, weight, "weight_zero_point"))

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        words, scales = word_count(shape[1], self.bits, "inputs"), self.grid.shape(shape)
        zeros = ((word_count(shape[0], self.bits, "outputs"), scales[1]),) if len(self.suffixes) > 2 else ()
        return (shape[0], words), scales, *zeros

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        cut = self.grid.cut(rows, columns)
        zeros = ((word_slice(rows, self.bits, "outputs"), cut[1]),) if len(self.suffixes) > 2 else ()
        return (rows, word_slice(columns, self.bits, "inputs")), cut, *zeros

    def numbers(self, part: tuple[np.ndarray, ...]) -> Numbers:
        words, scales, *zeros = part
        zero = self.zeros(zeros[0]) if zeros else 2 ** (self.bits - 1)
        return Numbers(from_words(words, self.bits), scales, zero)

    def zeros(self, words: np.ndarray) -> np.ndarray:
        return from_words(words.T, self.bits).T


AWQ, GPTQ, PACKED = Awq(4, Grid(1, 128)), Gptq(4, Grid(1, 128)), Packed(4, Grid(1, 128))
