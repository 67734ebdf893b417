"""Codes: a weight in whole numbers of few bits, as quantised files have it and as the CPU kernels multiply by it.

A number of it is `code * scale - low`, with a scale and a low for each group of neighbouring inputs of an output. Every quantised
format of files comes to this form without a change of any number. A product rounds the activations to int8 as well, each row in
groups of INPUTS (llama.cpp's Q8_0, its scale d kept in float32), and adds up the weight's groups in rising order:

    total += d * (float(sum of code * q) * scale - float(sum of q) * low)        or, where every low is zero * scale,
    total += d * (float(sum of (code - zero) * q) * scale)

The sums are exact whole numbers and each operation rounds once to float32, none fused: every implementation gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

INPUTS = 32
"""Neighbouring inputs of a row that share a scale of their int8 codes."""
LARGEST = 127
SMALLEST = 2.0**-100
"""Groups of activations whose numbers all lie below it count as zeros."""


class Scales(NamedTuple):
    """For each output and group the float32 number `parts * spans`: `parts` [out, in / group], float32 where they stand alone,
    uint8 or int8 where `spans`, float32 [out, in / span], multiplies them."""

    parts: np.ndarray
    spans: np.ndarray | None = None

    def floats(self) -> np.ndarray:
        """float32 [out, in / group], rounded once."""
        if self.spans is None:
            return self.parts
        return self.parts.astype(np.float32) * np.repeat(self.spans, self.parts.shape[1] // self.spans.shape[1], 1)


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

    def low(self) -> np.ndarray:
        """float32 [out, in / group]."""
        return self.lows.floats() if self.lows is not None else self.scales.floats() * np.float32(self.zero)

    def floats(self) -> np.ndarray:
        """The numbers that it stands for, float32 [out, in]: a product and a difference, each rounded once."""
        wide = self.codes.astype(np.float32) * np.repeat(self.scales.floats(), self.group, 1)
        wide -= np.repeat(self.low(), self.group, 1)
        return wide


class Activations(NamedTuple):
    """Rows of activations: `codes` int8 [T, in] times `scales` float32 [T, in / INPUTS]."""

    codes: np.ndarray
    scales: np.ndarray


def round_rows(x: np.ndarray) -> Activations:
    """x float32 [T, in], finite, in whole groups."""
    groups = x.reshape(x.shape[0], -1, INPUTS)
    largest = np.abs(groups).max(-1)
    largest[largest < SMALLEST] = 0
    with np.errstate(divide="ignore"):
        turned = np.float32(LARGEST) / largest
    codes = np.rint(groups * np.where(largest > 0, turned, np.float32(0))[:, :, None]).astype(np.int8)
    return Activations(codes.reshape(x.shape), largest / np.float32(LARGEST))


def sums(x: np.ndarray, weight: Codes) -> np.ndarray:
    """x float32 [T, in] times the weight -> float32 [T, out], as this file's head defines it. A group longer than INPUTS counts as
    several of that length with the same scale."""
    rows, step = round_rows(x), min(weight.group, INPUTS)
    scales, lows = (np.repeat(part, weight.group // step, 1) for part in (weight.scales.floats(), weight.low()))
    total = np.zeros((x.shape[0], weight.codes.shape[0]), np.float32)
    for place in range(x.shape[1] // step):
        inputs = slice(place * step, (place + 1) * step)
        some, codes = rows.codes[:, inputs].astype(np.int32), weight.codes[:, inputs].astype(np.int32)
        if weight.lows is None:
            part = (some @ (codes - weight.zero).T).astype(np.float32) * scales[:, place]
        else:
            part = (some @ codes.T).astype(np.float32) * scales[:, place]
            part -= some.sum(1, keepdims=True).astype(np.float32) * lows[:, place]
        total += rows.scales[:, place * step // INPUTS, None] * part
    return total
