"""Where weights go on the host: arrays of numpy, and weights packed for the CPU kernels. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import numpy as np

from vnext.kernels.arrays import Array
from vnext.kernels.codes import CodesForm
from vnext.kernels.cpu.memory import Arena, apart
from vnext.kernels.cpu.packed import packed, packed_experts, packed_ranges
from vnext.kernels.format import Format

APART_BYTES_MIN = 2**18  # smaller tensors are norms and biases, which stay
ReadCodes = Callable[[int, slice], Any]
"""Gives Codes, or BlockRows and FloatRows where a place takes them."""


class Place(Protocol):
    """Where a loader puts what it reads. `is_host`: whether packing can read from the files' own memory. `takes_blocks`: whether
    `pack_codes` takes those of GGUF files as they are."""

    is_host: bool
    takes_blocks: bool

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Zeros to be filled; most of these are packed and then dropped."""

    def copy(self, target: Array, piece: np.ndarray) -> None:
        """Fill a part of `zeros`, converted to its dtype."""

    def take(self, array: np.ndarray) -> Array:
        """A computed array: as it is on the host, else a tensor."""

    def integers(self, array: np.ndarray) -> Array:
        """Whole numbers of a file."""

    def pack(self, parts: tuple[Array, ...], gate: str, format: Format, shards: int) -> Any:
        """Pack a weight in one part of `zeros` or in parts of the files. A gated one has one shard."""

    def pack_codes(self, forms: tuple[CodesForm, ...], read: ReadCodes, dtype: np.dtype, gate: str, shards: int) -> object:
        """Pack a weight of parts of few bits, of which `read` gives some outputs of one, for activations of this dtype."""

    def pack_experts(self, weights: Array, gate: str, format: Format, shards: int) -> Any:
        """Pack the weights of `zeros` [E, out, in]."""


class HostPlace:
    """Arrays of numpy, float32 or bfloat16. `passing`: what is packed does not stay."""

    is_host = takes_blocks = True

    def __init__(self, passing: bool = False) -> None:
        self._arena = (lambda: Arena()) if passing else (lambda: None)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size_bytes = prod(shape) * dtype.itemsize
        return np.zeros(shape, dtype) if size_bytes < APART_BYTES_MIN else apart(size_bytes).view(dtype).reshape(shape)

    def copy(self, target: np.ndarray, piece: np.ndarray) -> None:
        target[...] = piece

    def take(self, array: np.ndarray) -> np.ndarray:
        return array

    integers = take

    def pack(self, parts: tuple[np.ndarray, ...], gate: str, format: Format, shards: int) -> Any:
        return packed(parts, gate, shards, self._arena())

    def pack_codes(self, forms: tuple[CodesForm, ...], read: ReadCodes, dtype: np.dtype, gate: str, shards: int) -> object:
        return packed_ranges(forms, read, dtype, gate, shards, self._arena())

    def pack_experts(self, weights: np.ndarray, gate: str, format: Format, shards: int) -> Any:
        return packed_experts(weights, gate, shards, self._arena())
