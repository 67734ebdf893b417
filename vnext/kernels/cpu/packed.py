"""Packed weights as the operations take them, made without torch.

Owns the memory of all packed weights of this process. Knows the kernels' limits, so that a rank can ask what they serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, torch_dtype
from vnext.kernels.codes import BlockRows, Codes, CodesForm, FloatRows
from vnext.kernels.cpu import linear, native
from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.memory import Arena
from vnext.kernels.format import INT8, Format
from vnext.kernels.formats.floats import PLAIN

if TYPE_CHECKING:
    import torch

HEAD_DIM_MAX = 640
FORMS_KEPT = 256
native.agree_on({"HEAD_MAX": HEAD_DIM_MAX})
HOST_TYPES = ("float32", "bfloat16")
"""The dtypes of activations and weights that the kernels take."""

_arena = Arena()


class Packed(NamedTuple):
    """A packed weight with what contracts ask of a plain one: `shape` [out, in] and `dtype`."""

    linear: PackedLinear
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.linear.dtype)

    @property
    def shards(self) -> int:
        return self.linear.shards


class PackedExperts(NamedTuple):
    """Weights [E, out, in], each packed: of a model's experts those from `first` on."""

    weights: tuple[Packed, ...]
    shape: tuple[int, int, int]
    first: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def __getitem__(self, expert: int) -> Packed:  # type: ignore[override]
        return self.weights[expert]


def packed(weight: Array | tuple[Array, ...], gate: str = "", shards: int = 1, arena: Arena | None = None) -> Packed:
    """A weight [out, in] of floats, or its parts one below the other. `arena`: None for that of weights that stay."""
    found = linear.pack(weight, gate=gate, shards=shards, arena=arena or _arena)
    return Packed(found, (found.outputs, found.inputs))


def packed_bytes(shape: tuple[int, int], dtype: Any, gate: str, shards: int) -> int:
    """The size of the buffer of a weight [out, in] that `packed` makes."""
    return linear.packed_bytes(shape, dtype, gate=gate, shards=shards)


def packed_in(buffer: np.ndarray, shape: tuple[int, int], dtype: Any, gate: str, shards: int) -> Packed:
    """The weight [out, in] that `packed` or `packed_codes` has put into this buffer, uint8, with these arguments."""
    return Packed(linear.packed_in(buffer, shape, dtype, gate=gate, shards=shards), shape)


def packed_codes(
    codes: Codes | tuple[Codes, ...], dtype: Any, gate: str = "", shards: int = 1, activations: str = INT8
) -> Packed:
    """A weight of few bits, or its parts one below the other, for activations of `dtype`; see linear.pack_codes."""
    found = linear.pack_codes(codes, gate=gate, shards=shards, dtype=dtype, arena=_arena, activations=activations)
    return Packed(found, (found.outputs, found.inputs))


def packed_ranges(
    forms: tuple[CodesForm, ...],
    read: Callable[[int, slice], Codes | BlockRows | FloatRows],
    dtype: np.dtype,
    gate: str,
    shards: int,
    arena: Arena | None = None,
) -> Packed:
    """As `packed_codes` of parts of these forms, some outputs at a time; see linear.pack_ranges."""
    found = linear.pack_ranges(forms, read, gate=gate, shards=shards, dtype=dtype, arena=arena or _arena)
    return Packed(found, (found.outputs, found.inputs))


@lru_cache(maxsize=FORMS_KEPT)  # the layers of a model are alike
def codes_bytes(forms: tuple[CodesForm, ...], gate: str, shards: int) -> int:
    """The size of the buffer that `packed_codes` makes of parts of these forms; 0 where the kernels have no order for them."""
    try:
        return linear.codes_bytes(forms, gate=gate, shards=shards)
    except ValueError:
        return 0


def packed_experts(weights: Array, gate: str, shards: int = 1, arena: Arena | None = None) -> PackedExperts:
    """Weights [E, out, in], each packed as `packed` does."""
    return PackedExperts(tuple(packed(weight, gate, shards, arena) for weight in weights), tuple(weights.shape))


def serves(dtype: str, format: Format = PLAIN) -> bool:
    """Whether the kernels compute in this dtype here, and multiply by weights of this format."""
    return native.is_built() and dtype in HOST_TYPES and bool(format.panels(dtype))


def serves_all(head_dim: int, format: Format = PLAIN) -> bool:
    """Whether every product and the attention of a float32 or bfloat16 model with weights of this format are these kernels', none a
    reference's."""
    return all(serves(dtype, format) for dtype in HOST_TYPES) and head_dim <= HEAD_DIM_MAX and head_dim % 2 == 0
