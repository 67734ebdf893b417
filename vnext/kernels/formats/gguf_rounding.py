"""Floats rounded to the blocks of GGUF files, as gguf_blocks.py reads them.

Types with a scale alone get the one that loses least (rounding.py), K-blocks scales and lows (k_rounding.py); of others, and of
8 bits, the package `gguf` makes the blocks.
"""

from __future__ import annotations

from types import MappingProxyType

import gguf
import numpy as np

from vnext.kernels.formats.bits import unsigned
from vnext.kernels.formats.gguf_blocks import SMALL
from vnext.kernels.formats.k_rounding import KINDS, to_k_blocks
from vnext.kernels.formats.rounding import to_integers

SEARCHED = MappingProxyType({"Q4_0": 4, "Q5_0": 5})
HALF = SMALL // 2


def to_blocks(weight: np.ndarray, type_: str, columns: np.ndarray | None = None) -> np.ndarray:
    """weight float32 [out, in], finite, in whole blocks -> uint8 [out, bytes], or floats of 16 or 32 bits as such. `columns`: as of
    to_integers, where scales are searched."""
    if type_ in KINDS:
        return to_k_blocks(weight, type_, columns)
    if type_ not in SEARCHED:
        return np.ascontiguousarray(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[type_])).view(np.uint8)
    bits = SEARCHED[type_]
    rounded = to_integers(weight, bits, SMALL, np.dtype(np.float16), columns)
    codes = unsigned(rounded.numbers, bits).reshape(len(weight), -1, SMALL)
    parts = [np.ascontiguousarray(rounded.scales).view(np.uint8).reshape(len(weight), -1, 2)]
    if bits == 5:
        parts.append(np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little"))
    parts.append(codes[..., :HALF] & np.uint8(15) | codes[..., HALF:] << np.uint8(4))
    return np.concatenate(parts, -1).reshape(len(weight), -1)
