"""Stack: runs a sequence of decoder layers in one call of the compiled module.

Owns the description of the layers, made once at loading, and the call. The order of operations and every bit of the result
equal those of the separate calls in `vnext/models/layers/decoder.py`, which run where this call cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.cpu.attention import AttentionPlan
from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.native import CACHE_KINDS, KINDS, agree_on_struct, module
from vnext.kernels.cpu.rows import address


class Caches(NamedTuple):
    """Addresses int64 [2 * layers] of each layer's keys and values [page_count, kv_heads, block_size, head_dim], their blocks
    dense and `block_stride` elements of `dtype` apart."""

    places: np.ndarray
    block_stride: int
    head_dim: int
    dtype: torch.dtype


class StackLayer(NamedTuple):
    """One layer's weights: `gate_up` holds its gate, all else is plain. Norms [hidden] and [head_dim], dense."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    window: int


agree_on_struct("StackLayer", StackLayer._fields)


class Stack(NamedTuple):
    """Layers with their description, int64 [layers, 12]: addresses into tensors that `layers` keeps alive."""

    layers: tuple[StackLayer, ...]
    table: np.ndarray
    dtype: torch.dtype
    hidden: int
    joined: int


class Angles(NamedTuple):
    """float32 [T, R / 2] each, dense, or None where nothing turns."""

    cosine: torch.Tensor | None
    sine: torch.Tensor | None


class AuxStates(NamedTuple):
    """`states` [T, n, hidden], dense, takes the inputs of the layers with the indices `layers` int64 [n]: the sums of the embedding
    and of what all layers before have added. The index behind the last layer's stands for the last sum."""

    layers: np.ndarray
    states: torch.Tensor


def describe(layers: tuple[StackLayer, ...]) -> Stack:
    """The stack of these layers, whose activations are of one dtype and size."""
    first = layers[0]
    table = np.array([[_number(field) for field in layer] for layer in layers], dtype=np.int64)
    return Stack(layers, table, first.qkv.dtype, first.qkv.inputs, first.qkv.outputs)


def _number(field: PackedLinear | torch.Tensor | int | None) -> int:
    if isinstance(field, PackedLinear):
        return field.address
    return field if isinstance(field, int) else address(field) or 0


def run(
    stack: Stack,
    residual: torch.Tensor,
    last_norm: torch.Tensor,
    caches: Caches,
    plan: AttentionPlan,
    slots: torch.Tensor,
    angles: Angles,
    sample_at: torch.Tensor,
    eps: float,
    scale: float,
    softcap: float,
    aux: AuxStates | None = None,
) -> torch.Tensor:
    """All layers on residual [T, hidden], dense, which is used up -> rows `sample_at` int64 [S] after `last_norm`.

    Slots and angles as in `rows.rotary_kv_write`; `plan`, `scale` and `softcap` as in `attention.paged_attention`, with every
    token of the step in a row of the plan. `aux` takes the inputs of some layers.
    """
    tokens, samples = residual.shape[0], sample_at.shape[0]
    found = torch.empty((samples, stack.hidden), dtype=residual.dtype)
    rotated = 0 if angles.cosine is None else 2 * angles.cosine.shape[1]
    module().run_stack(
        KINDS[residual.dtype], CACHE_KINDS[caches.dtype],
        stack.table.ctypes.data, caches.places.ctypes.data, len(stack.layers), caches.block_stride,
        last_norm.data_ptr(), plan.handle, tokens, stack.hidden, caches.head_dim, rotated, eps, scale, softcap,
        address(angles.cosine), address(angles.sine), slots.data_ptr(), sample_at.data_ptr(), samples,
        residual.data_ptr(), found.data_ptr(), *aux_numbers(aux),
    )  # fmt: skip
    return found


def aux_numbers(aux: AuxStates | None) -> tuple[int, int, int]:
    """The addresses of the layers and of the states, and between them how many layers there are."""
    return (0, 0, 0) if aux is None else (aux.layers.ctypes.data, len(aux.layers), aux.states.data_ptr())
