"""Codes: a weight in whole numbers of few bits, as quantised files have it and as the CPU kernels multiply by it.

A number of it is `code * scale - low`, with a scale and a low for each group of neighbouring inputs of an output. Every quantised
format of files comes to this form without a change of any number. A product rounds the activations to int8 as well, each row in
groups of INPUTS (llama.cpp's Q8_0, its scale d kept in float32), and adds up the weight's groups in rising order:

    total += d * (float(sum of code * q) * scale - float(sum of q) * low)        or, where every low is zero * scale,
    total += d * (float(sum of (code - zero) * q) * scale)

The sums are exact whole numbers and each operation rounds once to float32, none fused: every implementation gives the same bits.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import ml_dtypes
import numpy as np

INPUTS = 32
"""Neighbouring inputs of a row that share a scale of their int8 codes."""
LARGEST = 127
SMALLEST = 2.0**-100
"""Groups of activations whose numbers all lie below it count as zeros."""


SHORTEST = 16
"""Inputs of the shortest group; longer ones are multiples of INPUTS, or all inputs of an output."""


class ScaleForm(NamedTuple):
    """What Scales are made of: names of dtypes, and the inputs that share a number of `spans`, 0 where there are none."""

    parts: str = "float32"
    spans: str = "float32"
    span: int = 0


class CodesForm(NamedTuple):
    """What Codes are made of, without the numbers, and the kind of activations that meet them: `shape` [out, in]."""

    shape: tuple[int, int]
    bits: int
    group: int
    scales: ScaleForm = ScaleForm()
    zero: int = 0
    lows: ScaleForm | None = None
    activations: str = "int8"


class Scales(NamedTuple):
    """For each output and group the float32 number `parts * spans`: `parts` [out, in / group], floats of 32 or 16 bits where they
    stand alone, mostly uint8 or int8 where `spans`, floats [out, in / span], multiply them."""

    parts: np.ndarray
    spans: np.ndarray | None = None

    def floats(self) -> np.ndarray:
        """float32 [out, in / group], rounded once."""
        parts = self.parts.astype(np.float32)
        if self.spans is None:
            return parts
        return parts * np.repeat(self.spans.astype(np.float32), parts.shape[1] // self.spans.shape[1], 1)

    def cut(self, times: int, groups: slice, run: int) -> Scales:
        """With each group in so many, those that `groups` names; each `run` of them have spans of their own, 0 for any."""
        parts = np.repeat(self.parts, times, 1) if times > 1 else self.parts
        if self.spans is None:
            return Scales(parts[:, groups])
        of_span = parts.shape[1] // self.spans.shape[1]
        unit = gcd(of_span, groups.start, groups.stop, run)
        return Scales(parts[:, groups], np.repeat(self.spans, of_span // unit, 1)[:, groups.start // unit : groups.stop // unit])

    def outputs(self, rows: slice) -> Scales:
        return Scales(self.parts[rows], None if self.spans is None else self.spans[rows])

    def padded(self, rows: int) -> Scales:
        """With zeros behind the last output."""
        return Scales(_padded(self.parts, rows), self.spans if self.spans is None else _padded(self.spans, rows))

    def form(self, inputs: int) -> ScaleForm:
        """That of a weight with so many inputs."""
        if self.spans is None:
            return ScaleForm(self.parts.dtype.name)
        return ScaleForm(self.parts.dtype.name, self.spans.dtype.name, inputs // self.spans.shape[1])


class Codes(NamedTuple):
    """`codes` uint8 [out, in], below 2 ** bits. `lows`: None where every low is `zero * scale`."""

    codes: np.ndarray
    bits: int
    scales: Scales
    zero: int = 0
    lows: Scales | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.codes.shape[1] // self.scales.parts.shape[1])

    @property
    def form(self) -> CodesForm:
        outputs, inputs = self.codes.shape
        lows = None if self.lows is None else self.lows.form(inputs)
        return CodesForm((outputs, inputs), self.bits, self.group, self.scales.form(inputs), self.zero, lows)

    def low(self) -> np.ndarray:
        """float32 [out, in / group]."""
        return self.lows.floats() if self.lows is not None else self.scales.floats() * np.float32(self.zero)

    def is_finite(self) -> bool:
        """Whether all numbers that codes may stand for are."""
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(self.scales.floats() * np.float32(2**self.bits) + self.low()).all())

    def inputs(self, inputs: slice, run: int = 0) -> Codes:
        """Those of some inputs, each `run` of which have scales of their own, 0 for any. Raises ValueError where they are no whole
        groups, nor parts of one in whole INPUTS."""
        unit = gcd(self.group, inputs.start, inputs.stop, run)
        if unit % min(self.group, INPUTS) and unit != run:
            raise ValueError(f"inputs {inputs.start} to {inputs.stop} cut a group of {min(self.group, INPUTS)}")
        times, groups = self.group // unit, slice(inputs.start // unit, inputs.stop // unit)
        lows = self.lows and self.lows.cut(times, groups, run // unit)
        return Codes(self.codes[:, inputs], self.bits, self.scales.cut(times, groups, run // unit), self.zero, lows)

    def outputs(self, rows: slice) -> Codes:
        """Those outputs, where they lie."""
        lows = self.lows and self.lows.outputs(rows)
        return self._replace(codes=self.codes[rows], scales=self.scales.outputs(rows), lows=lows)

    def padded(self, rows: int) -> Codes:
        """With outputs of zeros behind the last, `rows` in all."""
        if rows == len(self.codes):
            return self
        lows = self.lows and self.lows.padded(rows)
        return self._replace(codes=_padded(self.codes, rows), scales=self.scales.padded(rows), lows=lows)

    def floats(self) -> np.ndarray:
        """The numbers that it stands for, float32 [out, in]: a product and a difference, each rounded once."""
        wide: np.ndarray = self.codes.astype(np.float32)
        wide *= np.repeat(self.scales.floats(), self.group, 1)
        wide -= np.repeat(self.low(), self.group, 1)
        return wide


def _padded(numbers: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(numbers, ((0, rows - len(numbers)), (0, 0)))


class BlockRows(NamedTuple):
    """Outputs of a weight as the blocks of a GGUF file, which the CPU kernels take apart themselves: uint8 [out, bytes], the bytes
    of a row side by side. `type`: of the blocks, by llama.cpp's name."""

    rows: np.ndarray
    type: str


class FloatRows(NamedTuple):
    """Outputs of a weight that is to have so many bits in groups of INPUTS: [out, in] in float32 or bfloat16, which the CPU kernels
    round to the numbers of formats/rounding.py themselves."""

    rows: np.ndarray
    bits: int


class Activations(NamedTuple):
    """Rows of activations: `codes` int8 [T, in] times `scales` float32 [T, in / INPUTS]."""

    codes: np.ndarray
    scales: np.ndarray


def round_rows(x: np.ndarray) -> Activations:
    """x float32 [T, in], in whole groups. One with a number that is not finite has the scale NaN and codes of 0."""
    groups = x.reshape(x.shape[0], -1, INPUTS)
    largest = np.abs(groups).max(-1)
    is_finite = np.isfinite(largest)
    is_coded = is_finite & (largest >= SMALLEST)
    turned = np.float32(LARGEST) / np.where(is_coded, largest, np.float32(1))
    codes = np.rint(np.where(is_coded[:, :, None], groups, np.float32(0)) * turned[:, :, None]).astype(np.int8)
    scales = np.where(is_coded, largest, np.float32(0)) / np.float32(LARGEST)
    return Activations(codes.reshape(x.shape), np.where(is_finite, scales, np.float32(np.nan)))


def sums(x: np.ndarray, weight: Codes, activations: str = "int8") -> np.ndarray:
    """x float32 [T, in] times the weight -> float32 [T, out], as this file's head defines it. A group longer than INPUTS counts as
    several of that length with the same scale; behind the last input follow zeros up to a whole group."""
    if activations == "bf16":
        return wide_sums(x, weight)
    inputs, step = x.shape[1], min(weight.group, INPUTS)
    rows = round_rows(np.pad(x, ((0, 0), (0, -inputs % INPUTS))))
    total = np.zeros((x.shape[0], weight.codes.shape[0]), np.float32)
    all_scales, all_lows = weight.scales.floats(), weight.low()
    for first in range(0, inputs, step):
        place = slice(first, min(first + step, inputs))
        scales, lows = all_scales[:, first // weight.group], all_lows[:, first // weight.group]
        some, codes = rows.codes[:, place].astype(np.int32), weight.codes[:, place].astype(np.int32)
        if weight.lows is None:
            part = (some @ (codes - weight.zero).T).astype(np.float32) * scales
        else:
            part = (some @ codes.T).astype(np.float32) * scales
            part -= some.sum(1, keepdims=True).astype(np.float32) * lows
        total += rows.scales[:, first // INPUTS, None] * part
    return total


def wide_sums(x: np.ndarray, weight: Codes) -> np.ndarray:
    """`sums` with activations in bfloat16, whose products with codes are exact. A sum over INPUTS, or over a shorter group, is of
    float32: of the even inputs from zero, rising, of the odd ones alike, and of both; that of activations alone is taken by halves.

        total += sum of code * x * scale - sum of x * low        or        total += (sum of code * x - zero * sum of x) * scale
    """
    inputs, step = x.shape[1], min(weight.group, INPUTS)
    behind = ((0, 0), (0, -inputs % INPUTS))
    rows = np.pad(x.astype(ml_dtypes.bfloat16).astype(np.float32), behind)
    codes = np.pad(weight.codes, behind).astype(np.float32)
    total = np.zeros((len(rows), len(codes)), np.float32)
    all_scales, all_lows, zero = weight.scales.floats(), weight.low(), np.float32(weight.zero)
    for first in range(0, inputs, step):
        scales, lows = all_scales[:, first // weight.group], all_lows[:, first // weight.group]
        dots, own = np.zeros((2, *total.shape), np.float32), rows[:, first : first + step]
        for k in range(step):
            dots[k % 2] += own[:, k, None] * codes[:, first + k]
        while own.shape[1] > 1:
            front, back = np.split(own, 2, 1)
            own = front + back
        dot = dots[0] + dots[1]
        total += (dot - zero * own) * scales if weight.lows is None else dot * scales - own * lows
    return total
