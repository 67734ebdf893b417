"""The sharding table: which part of each weight a rank holds, and the collectives that join the parts again.

    axis       split over ranks      weights that have it
    hidden     whole on every rank   embedding, norms, inputs of column-parallel and outputs of row-parallel weights
    heads      evenly                query projection (column), output projection (row)
    kv_heads   evenly, or one head   key, value projection (column); with fewer heads than ranks, neighbours share
    mlp        evenly                gate and up projection (column), down projection (row)
    vocab      evenly, last padded   embedding, output head
Models call the collectives and know no ranks. A row-parallel bias is whole on each rank and added after the reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from types import MappingProxyType

import msgspec
import torch

from vnext.models.config import ModelConfig
from vnext.models.errors import ModelError


class Axis(StrEnum):
    """A logical axis of a weight."""

    HIDDEN = "hidden"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    MLP = "mlp"
    VOCAB = "vocab"


WEIGHT_AXES = MappingProxyType(
    {
        "embed_tokens": (Axis.VOCAB, Axis.HIDDEN),
        "lm_head": (Axis.VOCAB, Axis.HIDDEN),
        "norm": (Axis.HIDDEN,),
        "input_layernorm": (Axis.HIDDEN,),
        "post_attention_layernorm": (Axis.HIDDEN,),
        "q_proj": (Axis.HEADS, Axis.HIDDEN),
        "k_proj": (Axis.KV_HEADS, Axis.HIDDEN),
        "v_proj": (Axis.KV_HEADS, Axis.HIDDEN),
        "o_proj": (Axis.HIDDEN, Axis.HEADS),
        "gate_proj": (Axis.MLP, Axis.HIDDEN),
        "up_proj": (Axis.MLP, Axis.HIDDEN),
        "down_proj": (Axis.HIDDEN, Axis.MLP),
    }
)
"""Axes of `<name>.weight`, [out, in]; `<name>.bias` has the first one."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of its group.

    `all_reduce(tensor)` gives the sum over ranks, the same bits on each. `all_gather(tensor, dim)` gives the ranks'
    tensors joined along dim in rank order. Either may return its argument changed in place.
    """

    rank: int
    world_size: int
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    all_gather: Callable[[torch.Tensor, int], torch.Tensor]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The half-open range [start, stop) of an axis that a rank holds, in a space of `size` >= stop - start."""

    start: int
    stop: int
    size: int


def alone() -> Parallel:
    """The group of one rank: both collectives are the identity."""
    return Parallel(rank=0, world_size=1, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)


def axes_of(name: str) -> tuple[Axis, ...]:
    """The axes of a checkpoint tensor such as "model.layers.0.self_attn.q_proj.weight"."""
    _, module, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.split("."))
    axes = WEIGHT_AXES[module]
    return axes[:1] if kind == "bias" else axes


def axis_size(axis: Axis, config: ModelConfig) -> int:
    """The whole size of an axis."""
    sizes = {
        Axis.HIDDEN: config.hidden_size,
        Axis.HEADS: config.head_count * config.head_dim,
        Axis.KV_HEADS: config.kv_head_count * config.head_dim,
        Axis.MLP: config.intermediate_size,
        Axis.VOCAB: config.vocab_size,
    }
    return sizes[axis]


def axis_part(axis: Axis, config: ModelConfig, parallel: Parallel) -> Part:
    """This rank's part of an axis. Call `check_world_size` once before."""
    whole, rank, ranks = axis_size(axis, config), parallel.rank, parallel.world_size
    if axis is Axis.HIDDEN:
        return Part(start=0, stop=whole, size=whole)
    if axis is Axis.KV_HEADS:
        size = local_kv_heads(config, ranks) * config.head_dim
        start = rank * config.kv_head_count // ranks * config.head_dim
        return Part(start=start, stop=start + size, size=size)
    size = -(-whole // ranks)
    start = min(rank * size, whole)
    return Part(start=start, stop=min(start + size, whole), size=size)


def local_heads(config: ModelConfig, world_size: int) -> int:
    """Query heads on one rank."""
    return config.head_count // world_size


def local_kv_heads(config: ModelConfig, world_size: int) -> int:
    """Key-value heads on one rank: at least one, shared by neighbours when there are fewer heads than ranks."""
    return max(1, config.kv_head_count // world_size)


def divides(config: ModelConfig, world_size: int) -> bool:
    """Whether heads and the intermediate size split evenly over this many ranks."""
    few, many = sorted((config.kv_head_count, world_size))
    return config.head_count % world_size == 0 and many % few == 0 and config.intermediate_size % world_size == 0


def check_world_size(config: ModelConfig, world_size: int) -> None:
    """Raise ModelError, naming the sizes that would do, when the model does not split over this many ranks."""
    if world_size >= 1 and divides(config, world_size):
        return
    fitting = [str(size) for size in range(1, config.head_count + 1) if divides(config, size)]
    raise ModelError(
        f"{config.head_count} attention heads, {config.kv_head_count} key-value heads and an intermediate size of "
        f"{config.intermediate_size} do not split over {world_size} ranks; choose a world size out of "
        f"{', '.join(fitting)}"
    )
