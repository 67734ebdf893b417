"""Weights of four bits as a GPU multiplies few rows by them: their places, and the plain form of the sums.

Sums have one order, in float32 (cuda/few_bits.cu): in each word of eight codes the products of the inputs with whole numbers, in
rising order; times the scale of the word, added word by word to the total of a lane; then the 32 lanes by halves. A product of a
16-bit number with such a whole one is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.kernels.codes import Codes

BITS, CODES, WORDS, LANES = 4, 8, 4, 32
SLAB = CODES * WORDS * LANES
"""Inputs that a warp reads together."""
GROUPS = (128, 64, 32)
"""Inputs that share a scale: those of longer groups are given for each part."""


class FewBits(NamedTuple):
    """Words int32 [out, slabs, 32, 4]: word j of a lane in a slab has the inputs slab * 1024 + j * 256 + lane * 8 on, the first in
    the lowest bits. `scales` and `lows` [out, groups], both float16 or both float32; `lows` None where they are zero * scale."""

    words: np.ndarray
    scales: np.ndarray
    lows: np.ndarray | None
    zero: int
    inputs: int
    group: int


def is_packable(codes: Codes) -> bool:
    """Whether these codes have a place in words."""
    return codes.bits == BITS and codes.group % GROUPS[-1] == 0


def packed(codes: Codes) -> FewBits:
    """Codes [out, in] that are packable."""
    outputs, inputs = codes.codes.shape
    group = next(each for each in GROUPS if codes.group % each == 0)
    places = np.pad(codes.codes, ((0, 0), (0, -inputs % SLAB))).reshape(outputs, -1, WORDS, LANES, CODES).astype(np.uint32)
    words = np.bitwise_or.reduce(places << np.arange(0, 32, BITS, dtype=np.uint32), -1).view(np.int32)
    given = [codes.scales, *([] if codes.lows is None else [codes.lows])]
    is_half = all(each.spans is None and each.parts.dtype == np.float16 for each in given)
    numbers = [np.repeat(each.parts if is_half else each.floats(), codes.group // group, 1) for each in given]
    lows = numbers[1] if len(numbers) > 1 else None
    return FewBits(np.ascontiguousarray(words.swapaxes(2, 3)), numbers[0], lows, codes.zero, inputs, group)


def unpacked(words: np.ndarray) -> np.ndarray:
    """Words [out, slabs, 32, 4] -> the codes uint8 [out, slabs * 1024]."""
    codes = words.swapaxes(2, 3).view(np.uint32)[..., None] >> np.arange(0, 32, BITS, dtype=np.uint32) & np.uint32(15)
    return codes.astype(np.uint8).reshape(len(words), -1)


def sums(x: np.ndarray, weight: FewBits) -> np.ndarray:
    """x float32 [T, in], of numbers of 16 bits, times the weight -> float32 [T, out], as this file's head defines it."""
    rows = np.pad(x, ((0, 0), (0, -weight.inputs % SLAB))).reshape(len(x), 1, -1, LANES, CODES)
    zero = 0 if weight.lows is not None else weight.zero
    whole = (unpacked(weight.words).astype(np.float32) - np.float32(zero)).reshape(1, len(weight.words), -1, LANES, CODES)
    lanes = np.arange(LANES) * CODES
    total = np.zeros((len(x), len(weight.words), LANES), np.float32)
    for run in range(whole.shape[2]):
        groups = np.minimum(run * LANES * CODES + lanes, weight.inputs - 1) // weight.group
        part, summed = np.zeros_like(total), np.zeros((len(x), 1, LANES), np.float32)
        for code in range(CODES):
            part = part + rows[:, :, run, :, code] * whole[:, :, run, :, code]
            summed = summed + rows[:, :, run, :, code]
        part = part * weight.scales[:, groups].astype(np.float32)
        if weight.lows is not None:
            part = part - summed * weight.lows[:, groups].astype(np.float32)
        total = total + part
    for bits in (16, 8, 4, 2, 1):
        total = total + total[..., np.arange(LANES) ^ bits]
    return total[..., 0]
