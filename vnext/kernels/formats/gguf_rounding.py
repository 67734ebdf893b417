"""Floats rounded to the blocks of GGUF files, as gguf_blocks.py reads them.

Types with a scale alone get the one that loses least (rounding.py), others scales and lows (k_rounding.py); of 8 bits and of
floats the package `gguf` makes the blocks.
"""

from __future__ import annotations

from types import MappingProxyType

import gguf
import numpy as np

from vnext.kernels.formats.bits import unsigned
from vnext.kernels.formats.gguf_blocks import SMALL
from vnext.kernels.formats.k_rounding import KINDS, best_lines, to_k_blocks
from vnext.kernels.formats.rounding import TOGETHER, to_integers, weights_of

SEARCHED = MappingProxyType({"Q4_0": 4, "Q5_0": 5, "Q4_1": 4, "Q5_1": 5})
HALF = SMALL // 2


def to_blocks(weight: np.ndarray, type_: str, columns: np.ndarray | None = None) -> np.ndarray:
    """weight float32 [out, in], finite, in whole blocks -> uint8 [out, bytes], or floats of 16 or 32 bits as such. `columns`: as of
    to_integers, where scales are searched."""
    if type_ in KINDS:
        return to_k_blocks(weight, type_, columns)
    if type_ not in SEARCHED:
        return np.ascontiguousarray(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[type_])).view(np.uint8)
    bits = SEARCHED[type_]
    if type_.endswith("_1"):
        whole, halves = _lines(weight, bits, columns)
    else:
        rounded = to_integers(weight, bits, SMALL, np.dtype(np.float16), columns)
        whole, halves = unsigned(rounded.numbers, bits), np.ascontiguousarray(rounded.scales)[..., None]
    codes = whole.reshape(len(weight), -1, SMALL)
    parts = [halves.view(np.uint8).reshape(len(weight), codes.shape[1], -1)]
    if bits == 5:
        parts.append(np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little"))
    parts.append(codes[..., :HALF] & np.uint8(15) | codes[..., HALF:] << np.uint8(4))
    return np.concatenate(parts, -1).reshape(len(weight), -1)


def _lines(weight: np.ndarray, bits: int, columns: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [out, in], and of each group its scale and its least number, float16 [out, groups, 2]."""
    rows, top, found = max(1, TOGETHER // weight.shape[1]), 2**bits - 1, []
    for row in range(0, len(weight), rows):
        some = weight[row : row + rows]
        groups = np.ascontiguousarray(some.reshape(-1, SMALL).T)
        matters = weights_of(groups, None if columns is None else np.tile(columns.reshape(-1, SMALL).T, len(some)))
        scales, lows = (each.astype(np.float16) for each in best_lines(groups, matters, top, is_signed=True))
        wide = np.where(scales > 0, scales, np.ones((), np.float16)).astype(np.float32)
        codes = np.clip(np.rint((groups + lows.astype(np.float32)) / wide), 0, top) * (scales > 0)
        found.append((codes.T.reshape(some.shape).astype(np.uint8), np.stack((scales, -lows), -1).reshape(len(some), -1, 2)))
    return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])
