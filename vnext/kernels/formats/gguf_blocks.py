"""The blocks of GGUF files: numbers of few bits behind their scales, by llama.cpp's names of types.

A row of such a tensor is a row of blocks of some inputs each. Where a type's numbers are evenly spaced, or few enough to stand in
a table of whole numbers, `codes` gives exactly them; the others become floats by the package `gguf`.
Source: the structs block_* in ggml/src/ggml-common.h and dequantize_row_* in ggml/src/ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from vnext.kernels.codes import Codes, Scales
from vnext.kernels.format import Cut, Format, Shape

IQ4 = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""What the codes of IQ4_NL and IQ4_XS stand for."""
FP4 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice what those of MXFP4 stand for."""


def _halves(blocks: np.ndarray, place: int) -> np.ndarray:
    """The float16 at byte `place` of each block [out, n, bytes] -> [out, n]."""
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]


def _fields(blocks: np.ndarray, places: slice, bits: int, run: int) -> np.ndarray:
    """The numbers of `bits` in these bytes of each block, uint8 [out, n, -]: of `run` bytes the lowest bits, then the others."""
    outputs, count, _ = blocks.shape
    some = blocks[..., places].reshape(outputs, count, -1, 1, run)
    found = (some >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]) & np.uint8(2**bits - 1)
    return found.reshape(outputs, count, -1)


def _flat(numbers: np.ndarray) -> np.ndarray:
    """[out, n, m] -> [out, n * m]."""
    return numbers.reshape(len(numbers), -1)


def _with_scale(codes: np.ndarray, bits: int, blocks: np.ndarray, place: int, zero: int) -> Codes:
    """Codes of blocks with one scale, float16 at byte `place`, and lows that follow from it."""
    return Codes(_flat(codes), bits, Scales(_halves(blocks, place)), zero)


def _with_low(codes: np.ndarray, bits: int, blocks: np.ndarray) -> Codes:
    """Codes of blocks that begin with a scale and a lowest number."""
    return Codes(_flat(codes), bits, Scales(_halves(blocks, 0)), lows=Scales(-_halves(blocks, 2)))


def _fifth(blocks: np.ndarray, place: int) -> np.ndarray:
    """The highest bits of 32 numbers of five, in four bytes from `place` on."""
    return np.unpackbits(blocks[..., place : place + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: np.ndarray) -> Codes:
    return _with_scale(_fields(blocks, slice(2, 18), 4, 16), 4, blocks, 0, 8)


def _q4_1(blocks: np.ndarray) -> Codes:
    return _with_low(_fields(blocks, slice(4, 20), 4, 16), 4, blocks)


def _q5_0(blocks: np.ndarray) -> Codes:
    return _with_scale(_fields(blocks, slice(6, 22), 4, 16) | _fifth(blocks, 2), 5, blocks, 0, 16)


def _q5_1(blocks: np.ndarray) -> Codes:
    return _with_low(_fields(blocks, slice(8, 24), 4, 16) | _fifth(blocks, 4), 5, blocks)


def _q8_0(blocks: np.ndarray) -> Codes:
    return _with_scale(blocks[..., 2:] ^ np.uint8(128), 8, blocks, 0, 128)


def _q2_k(blocks: np.ndarray) -> Codes:
    low, high = blocks[..., :16] & np.uint8(15), blocks[..., :16] >> np.uint8(4)
    scales, lows = Scales(_flat(low), _halves(blocks, 80)), Scales(_flat(high), _halves(blocks, 82))
    return Codes(_flat(_fields(blocks, slice(16, 80), 2, 32)), 2, scales, lows=lows)


def _q3_k(blocks: np.ndarray) -> Codes:
    codes = _fields(blocks, slice(32, 96), 2, 32) | _fields(blocks, slice(0, 32), 1, 32) << np.uint8(2)
    scales = _fields(blocks, slice(96, 104), 4, 8) | _fields(blocks, slice(104, 108), 2, 4) << np.uint8(4)
    return Codes(_flat(codes), 3, Scales(_flat(scales).view(np.int8) - np.int8(32), _halves(blocks, 108)), 4)


def _with_lows_of_six(codes: np.ndarray, bits: int, blocks: np.ndarray) -> Codes:
    """Codes of blocks of 256 that begin with two float16, then the 6 bits of 8 scales and 8 lows."""
    scales, lows, rest = (blocks[..., place : place + 4] for place in (4, 8, 12))
    high, four, six = np.uint8(0x30), np.uint8(15), np.uint8(63)
    parts = np.concatenate([scales & six, rest & four | scales >> np.uint8(2) & high], -1)
    their_lows = np.concatenate([lows & six, rest >> np.uint8(4) | lows >> np.uint8(2) & high], -1)
    return Codes(_flat(codes), bits, Scales(_flat(parts), _halves(blocks, 0)), lows=Scales(_flat(their_lows), _halves(blocks, 2)))


def _q4_k(blocks: np.ndarray) -> Codes:
    return _with_lows_of_six(_fields(blocks, slice(16, 144), 4, 32), 4, blocks)


def _q5_k(blocks: np.ndarray) -> Codes:
    codes = _fields(blocks, slice(48, 176), 4, 32) | _fields(blocks, slice(16, 48), 1, 32) << np.uint8(4)
    return _with_lows_of_six(codes, 5, blocks)


def _q6_k(blocks: np.ndarray) -> Codes:
    codes = _fields(blocks, slice(0, 128), 4, 64) | _fields(blocks, slice(128, 192), 2, 32) << np.uint8(4)
    return Codes(_flat(codes), 6, Scales(_flat(blocks[..., 192:208]).view(np.int8), _halves(blocks, 208)), 32)


def _tq1_0(blocks: np.ndarray) -> Codes:
    threes = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    outputs, count, _ = blocks.shape
    parts = ((slice(0, 32), threes), (slice(32, 48), threes), (slice(48, 52), threes[:4]))
    runs = [(blocks[..., None, places] * factors).reshape(outputs, count, -1) for places, factors in parts]
    codes = (np.concatenate(runs, -1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return _with_scale(codes, 2, blocks, 52, 1)


def _tq2_0(blocks: np.ndarray) -> Codes:
    return _with_scale(_fields(blocks, slice(0, 64), 2, 32), 2, blocks, 64, 1)


def _iq4_nl(blocks: np.ndarray) -> Codes:
    codes = (IQ4 + 128).astype(np.uint8)[_fields(blocks, slice(2, 18), 4, 16)]
    return _with_scale(codes, 8, blocks, 0, 128)


def _iq4_xs(blocks: np.ndarray) -> Codes:
    codes = (IQ4 + 128).astype(np.uint8)[_fields(blocks, slice(8, 136), 4, 16)]
    low = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    high = blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    parts = _flat(low).view(np.int8) + (_flat(high) << np.uint8(4)).view(np.int8) - np.int8(32)
    return Codes(_flat(codes), 8, Scales(parts, _halves(blocks, 0)), 128)


def _mxfp4(blocks: np.ndarray) -> Codes:
    codes = (FP4 + 12).astype(np.uint8)[_fields(blocks, slice(1, 17), 4, 16)]
    return Codes(_flat(codes), 5, Scales(np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)), 12)


class Blocks(Format):
    """Blocks of `group` inputs and `size` bytes each. `codes_of`: what blocks uint8 [out, n, size] stand for, None where only the
    package knows."""

    has_one_form = True

    def __init__(self, name: str, group: int, size: int, codes_of: Callable[[np.ndarray], Codes] | None = None) -> None:
        self.name, self.dtypes, self.group, self.size = name, (name,), group, size
        self._codes_of, self.has_codes = codes_of, codes_of is not None

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, inputs = shape
        if inputs % self.group:
            raise ValueError(f"{inputs} inputs are no whole blocks of {self.group}")
        return ((outputs, self._bytes(inputs)),)

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        return ((rows, slice(self._bytes(columns.start), self._bytes(columns.stop))),)

    def codes(self, part: tuple[np.ndarray, ...]) -> Codes:
        assert self._codes_of is not None
        with np.errstate(invalid="ignore"):
            found = self._codes_of(np.ascontiguousarray(part[0]).reshape(len(part[0]), -1, self.size))
        if not found.is_finite():
            raise ValueError("it has a scale that is not finite")
        return found

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        if self.has_codes:
            return self.codes(part).floats()
        import gguf

        numbers: np.ndarray = gguf.quants.dequantize(np.ascontiguousarray(part[0]), gguf.GGMLQuantizationType[self.name])
        if not np.isfinite(numbers).all():
            raise ValueError("it has numbers that are not finite")
        return numbers

    def _bytes(self, inputs: int) -> int:
        return inputs // self.group * self.size


SMALL, LARGE = 32, 256
_TYPES: dict[str, tuple[Any, ...]] = {
    "Q4_0": (SMALL, 18, _q4_0), "Q4_1": (SMALL, 20, _q4_1), "Q5_0": (SMALL, 22, _q5_0), "Q5_1": (SMALL, 24, _q5_1),
    "Q8_0": (SMALL, 34, _q8_0), "Q2_K": (LARGE, 84, _q2_k), "Q3_K": (LARGE, 110, _q3_k), "Q4_K": (LARGE, 144, _q4_k),
    "Q5_K": (LARGE, 176, _q5_k), "Q6_K": (LARGE, 210, _q6_k), "TQ1_0": (LARGE, 54, _tq1_0), "TQ2_0": (LARGE, 66, _tq2_0),
    "IQ4_NL": (SMALL, 18, _iq4_nl), "IQ4_XS": (LARGE, 136, _iq4_xs), "MXFP4": (SMALL, 17, _mxfp4), "IQ1_S": (LARGE, 50),
    "IQ1_M": (LARGE, 56), "IQ2_XXS": (LARGE, 66), "IQ2_XS": (LARGE, 74), "IQ2_S": (LARGE, 82), "IQ3_XXS": (LARGE, 98),
    "IQ3_S": (LARGE, 110),
}  # fmt: skip
BLOCKS = SimpleNamespace(**{name: Blocks(name, *rest) for name, rest in _TYPES.items()})
