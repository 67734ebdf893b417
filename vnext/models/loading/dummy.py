"""Dummy weights: random numbers in the place of a checkpoint's files, for benchmarks and tests of large shapes.

Names and shapes come from the family. A number depends on its tensor's name and its place in it alone, so that every split over
ranks and stages has the same model. Norms get numbers in [1, 2), biases small ones, and matrices such that a product keeps the
size of its inputs: all logits are finite. Computes numbers where they are read, and keeps none.
"""

from __future__ import annotations

from hashlib import blake2b
from math import log2, prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

from vnext.models.config.folder import DUMMY_NAME
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.layers.sharding import Layout, layout_of, weight_axes, whole_shape
from vnext.models.loading.recording import Recording
from vnext.models.registry import family, mtp, tower_parts

FILE_NAMES = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})
NUMBERS_A_BLOCK = 16
"""Of the generator: each has 256 bits."""
SIGN, MANTISSA, MANTISSA_BITS, ZERO_EXPONENT = 0x8000, 0x7F, 7, 127  # of bfloat16
BIAS_EXPONENT = -6
DRAWN_TOGETHER = 2**22


class Drawn(NamedTuple):
    """A tensor of random numbers: its dtype by a file's name for it, its whole shape, and its size in bytes as `stop`. The numbers
    have magnitudes in [2 ** exponent, 2 ** (exponent + 1)), and both signs if `is_signed`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    key: int
    exponent: int
    is_signed: bool
    stop: int
    start: int = 0

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor."""
        width = prod(self.shape[1:])
        rows = range(self.shape[0])[ranges[0] if ranges else slice(None)]
        columns = range(width)[ranges[1] if len(ranges) > 1 else slice(None)]
        bits = np.empty((len(rows), len(columns)), np.uint16)
        together = max(1, DRAWN_TOGETHER // width)
        for first in range(0, len(rows), together):
            count = min(together, len(rows) - first)
            numbers = self._bits((rows.start + first) * width, count * width).reshape(count, width)
            bits[first : first + count] = numbers[:, columns.start : columns.stop]
        found: np.ndarray = bits.view(ml_dtypes.bfloat16).reshape((len(rows), len(columns))[: len(self.shape)])
        return found if self.dtype == "BF16" else found.astype(np.float16 if self.dtype == "F16" else np.float32)

    def release(self) -> None:
        """Nothing is kept."""

    def _bits(self, start: int, count: int) -> np.ndarray:
        """Numbers of the flat tensor from number `start` on, as bits of bfloat16, uint16 [count]."""
        block, skipped = divmod(start, NUMBERS_A_BLOCK)
        words = -(-(skipped + count) // 4)
        drawn = np.random.Philox(key=self.key, counter=block).random_raw(words).astype("<u8", copy=False).view("<u2")
        drawn &= (SIGN if self.is_signed else 0) | MANTISSA
        drawn |= (self.exponent + ZERO_EXPONENT) << MANTISSA_BITS
        return drawn[skipped : skipped + count]


def drawn_tensors(path: Path) -> dict[str, Drawn]:
    """The tensors of the model whose configuration is in folder `path`, by name. Raises ModelError."""
    config = load_config(path)
    recording, layouts = Recording(lambda name: True), weight_axes(config)
    family(config.architecture).assemble(recording, config)
    if config.mtp_layers and (drafting := mtp(config.architecture)):
        drafting.assemble(recording, config)
    names = recording.read - recording.heads
    drawn = {name: _drawn(path / DUMMY_NAME, name, layout_of(name, layouts), config) for name in sorted(names)}
    return drawn | _tower_tensors(path, config) if config.tower or config.sound else drawn


def _tower_tensors(path: Path, config: ModelConfig) -> dict[str, Drawn]:
    parts, recording = tower_parts(config.architecture), Recording(lambda name: True)
    tower = parts.config(config)
    parts.assemble(recording, tower)
    layouts = weight_axes(tower)
    return {name: _drawn(path / DUMMY_NAME, name, layout_of(name, layouts), tower) for name in sorted(recording.read)}


def _drawn(file: Path, name: str, layout: Layout, config: ModelConfig) -> Drawn:
    shape, dtype = whole_shape(layout, config), FILE_NAMES[config.dtype]
    key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    is_norm = layout.inner is None and not name.endswith(".bias")
    inputs = shape[0] if layout.flipped else prod(shape[1:])
    exponent = 0 if is_norm else BIAS_EXPONENT if layout.inner is None else round(-log2(inputs) / 2 - log2(1.5))
    return Drawn(file, dtype, shape, key, exponent, not is_norm, prod(shape) * (4 if dtype == "F32" else 2))
