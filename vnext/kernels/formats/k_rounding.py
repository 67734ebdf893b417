"""Floats rounded to the K-blocks of GGUF files: 256 inputs, whose groups of 16 or 32 have scales, and mostly lows, of few bits.

The best scale and low of each group come first, as floats: a range is tried at several widths, and the codes of each give the
weighted least squares of both. Then the largest of a block's scales, and of its lows, stands for the most that their few bits hold,
and each group tries the neighbours of what they are rounded to. The same input gives the same bits.
Source: the idea of make_qkx2_quants in ggml/src/ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vnext.kernels.formats.rounding import TOGETHER, searched, sum_of, weights_of

WIDTHS = tuple(step / 4 for step in range(-4, 5))
"""How many codes more than there are the range of a group may have."""
NEIGHBOURS = (-1, 0, 1)
BLOCK = 256
HALF = np.dtype(np.float16)


class Kind(NamedTuple):
    """Codes of `bits` for groups of so many inputs, and scales below `limit`: with lows below it, too, or, `is_even`, of both signs
    and with a zero in the middle of the codes."""

    bits: int
    group: int
    limit: int
    is_even: bool = False


KINDS = MappingProxyType(
    {
        "Q2_K": Kind(2, 16, 16), "Q3_K": Kind(3, 16, 32, True), "Q4_K": Kind(4, 32, 64), "Q5_K": Kind(5, 32, 64),
        "Q6_K": Kind(6, 16, 128, True),
    }
)  # fmt: skip


class _Blocks(NamedTuple):
    """Of n groups: `codes` uint8 [group, n]; `scales` and `lows`, whole numbers [n]; their floats [n / groups of a block]."""

    codes: np.ndarray
    scales: np.ndarray
    lows: np.ndarray
    spans: np.ndarray
    low_spans: np.ndarray


def to_k_blocks(weight: np.ndarray, type_: str, columns: np.ndarray | None = None) -> np.ndarray:
    """weight float32 [out, in], finite, in whole blocks -> uint8 [out, bytes]. `columns`: as of to_integers."""
    rows, kind = max(1, TOGETHER // weight.shape[1]), KINDS[type_]
    parts = []
    for row in range(0, len(weight), rows):
        some = weight[row : row + rows]
        groups = np.ascontiguousarray(some.reshape(-1, kind.group).T)
        matters = weights_of(groups, None if columns is None else np.tile(columns.reshape(-1, kind.group).T, len(some)))
        found = (_even if kind.is_even else _with_lows)(groups, matters, kind)
        parts.append(_bytes_of(type_, found).reshape(len(some), -1))
    return np.concatenate(parts)


# ---- searches


def _even(groups: np.ndarray, matters: np.ndarray, kind: Kind) -> _Blocks:
    """Of types without lows."""
    half = 2 ** (kind.bits - 1)
    largest = np.abs(groups).max(0) / np.float32(half - 1)
    wanted = searched(groups, half, np.where(groups.max(0) > -groups.min(0), -largest, largest), np.dtype(np.float32), matters)
    blocks = wanted.reshape(-1, BLOCK // kind.group)
    longest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)[:, 0]
    spans = (longest / np.float32(-kind.limit)).astype(HALF)
    wide = _repeated(spans, kind)
    near = np.rint(_divided(wanted, wide))

    def coded(scales: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.clip(np.rint(_divided(groups, scales * wide)), -half, half - 1)
        return found

    def error(scales: np.ndarray) -> np.ndarray:
        return sum_of(matters * np.square(coded(scales) * (scales * wide) - groups))

    best = _least([np.clip(near + step, -kind.limit, kind.limit - 1) for step in NEIGHBOURS], error)
    return _Blocks((coded(best) + half).astype(np.uint8), best.astype(np.int8), best, spans, spans)


def _with_lows(groups: np.ndarray, matters: np.ndarray, kind: Kind) -> _Blocks:
    """Of types with lows."""
    top, most = np.float32(2**kind.bits - 1), kind.limit - 1
    found = best_lines(groups, matters, int(top))
    spans, low_spans = ((each.reshape(-1, BLOCK // kind.group).max(1) / np.float32(most)).astype(HALF) for each in found)
    wide, low_wide = _repeated(spans, kind), _repeated(low_spans, kind)
    near, low_near = np.rint(_divided(found[0], wide)), np.rint(_divided(found[1], low_wide))

    def coded(pair: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.clip(np.rint(_divided(groups + pair[1] * low_wide, pair[0] * wide)), 0, top)
        return found

    def error(pair: np.ndarray) -> np.ndarray:
        return sum_of(matters * np.square(coded(pair) * (pair[0] * wide) - pair[1] * low_wide - groups))

    pairs = [np.clip(np.stack((near + one, low_near + other)), 0, most) for one in NEIGHBOURS for other in NEIGHBOURS]
    best = _least(pairs, error)
    return _Blocks(coded(best).astype(np.uint8), best[0].astype(np.uint8), best[1].astype(np.uint8), spans, low_spans)


def best_lines(
    groups: np.ndarray, matters: np.ndarray, top: int, is_signed: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the low, float32 [n], that lose least of each of `groups` [inputs, n] as codes up to `top` times the scale,
    less the low. Neither is below zero, but the low where it `is_signed`."""
    lowest, count = groups.min(0) if is_signed else np.minimum(groups.min(0), 0), sum_of(matters)
    counted = matters * groups
    total, spread = sum_of(counted), groups.max(0) - lowest
    best = np.zeros((3, len(lowest)), np.float32)
    best[2] = np.inf
    for width in WIDTHS:
        codes = np.clip(np.rint(_divided((groups - lowest) * np.float32(top + width), spread)), 0, top)
        ones, squares, products = (sum_of(each * codes) for each in (matters, matters * codes, counted))
        scale = _divided(count * products - total * ones, count * squares - ones * ones)
        low = _divided(ones * scale - total, count)
        if not is_signed:
            scale, low = np.where(low < 0, _divided(products, squares), scale), np.maximum(low, 0)
        scale = np.maximum(scale, 0)
        tried = np.stack((scale, low, sum_of(matters * np.square(codes * scale - low - groups))))
        best = np.where(tried[2] < best[2], tried, best)
    return best[0], best[1]


def _least(choices: list[np.ndarray], error: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Of each group, the last axis, the choice with the smallest error, the first of equal ones."""
    best, least = choices[0], error(choices[0])
    for each in choices[1:]:
        found = error(each)
        best, least = np.where(found < least, each, best), np.minimum(found, least)
    return best


def _repeated(spans: np.ndarray, kind: Kind) -> np.ndarray:
    """A block's float for each of its groups."""
    return np.repeat(spans.astype(np.float32), BLOCK // kind.group)


def _divided(numbers: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The quotients, 0 by zero."""
    found = np.zeros(np.broadcast_shapes(numbers.shape, by.shape), np.float32)
    np.divide(numbers, by, out=found, where=by != 0)
    return found


# ---- bytes


def _bytes_of(type_: str, blocks: _Blocks) -> np.ndarray:
    """uint8 [blocks, bytes], as gguf_blocks.py takes them apart."""
    count = len(blocks.spans)
    codes = np.ascontiguousarray(blocks.codes.T).reshape(count, BLOCK)
    scales, lows = (each.reshape(count, -1) for each in (blocks.scales, blocks.lows))
    spans, low_spans = (np.ascontiguousarray(each).view(np.uint8).reshape(count, 2) for each in (blocks.spans, blocks.low_spans))
    low_bits = codes & np.uint8(15)
    match type_:
        case "Q2_K":
            parts = [scales | lows << np.uint8(4), _packed(codes, 2, 32), spans, low_spans]
        case "Q3_K":
            signed = (scales + np.int8(32)).astype(np.uint8)
            fours = [_packed(signed & np.uint8(15), 4, 8), _packed(signed >> np.uint8(4), 2, 4)]
            parts = [_packed(codes >> np.uint8(2), 1, 32), _packed(codes & np.uint8(3), 2, 32), *fours, spans]
        case "Q4_K":
            parts = [spans, low_spans, _sixes(scales, lows), _packed(codes, 4, 32)]
        case "Q5_K":
            parts = [spans, low_spans, _sixes(scales, lows), _packed(codes >> np.uint8(4), 1, 32), _packed(low_bits, 4, 32)]
        case _:
            parts = [_packed(low_bits, 4, 64), _packed(codes >> np.uint8(4), 2, 32), scales.view(np.uint8), spans]
    return np.concatenate(parts, -1)


def _packed(numbers: np.ndarray, bits: int, run: int) -> np.ndarray:
    """uint8 [n, m] below 2^bits -> uint8 [n, m * bits / 8]: into `run` bytes first the lowest bits of each, then the others."""
    parts = numbers.reshape(len(numbers), -1, 8 // bits, run)
    found: np.ndarray = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=2)
    return found.reshape(len(numbers), -1)


def _sixes(scales: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Eight scales and eight lows of six bits, [n, 8] each, in 12 bytes."""
    four, fifteen = np.uint8(4), np.uint8(15)
    high = [each[:, :4] | each[:, 4:] >> four << np.uint8(6) for each in (scales, lows)]
    return np.concatenate([*high, scales[:, 4:] & fifteen | lows[:, 4:] << four], -1)
