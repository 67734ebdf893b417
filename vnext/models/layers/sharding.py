"""The sharding table: which part of each weight a rank holds, and the collectives that join the parts again.

    axis                   split over ranks      weights that have it
    hidden, head_dim,      whole on every rank   embedding, norms, routers, inputs of column-parallel and outputs of
    experts, positions                           row-parallel weights
    heads, three_heads     evenly                query projection (column), output projection (row); all three, head by head
    kv_heads               evenly, or one head   key, value projection (column); with few heads, neighbours share one
    mlp, expert_mlp, state evenly                gate and up projection (column), down projection (row); recurrent layers
    vocab                  evenly, last padded   embedding, output head
    those of draft heads   whole                 draft heads
With `Parallel.by_expert` experts are divided, not their axes. Models call the collectives. A row-parallel bias is whole on each
rank and added after the reduce. The inputs of a row-parallel weight are cut into shards, as many as the model says (shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from vnext.kernels.shards import SHARDS_MAX
from vnext.models.config.model_config import ModelConfig, Recurrent, without_windows
from vnext.models.errors import ModelError
from vnext.models.registry import family

if TYPE_CHECKING:
    import torch


class Axis(StrEnum):
    """A logical axis of a weight."""

    HIDDEN = "hidden"
    HEAD_DIM = "head_dim"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    MLP = "mlp"
    EXPERTS = "experts"
    EXPERT_MLP = "expert_mlp"
    SHARED_MLP = "shared_mlp"
    VOCAB = "vocab"
    POSITIONS = "positions"
    TWICE_HIDDEN = "twice_hidden"
    TARGET = "target"
    DRAFT_VOCAB = "draft_vocab"
    GATED_HEADS = "gated_heads"
    ONE = "one"
    THREE_HEADS = "three_heads"
    STATE_KEYS = "state_keys"
    STATE_VALUES = "state_values"
    STATE_HEADS = "state_heads"
    STATE_HEAD_DIM = "state_head_dim"
    STATE_WIDTH = "state_width"


class Sized(NamedTuple):
    """An axis of a model that says its sizes by tensor: whole on every rank, or split evenly, in units of so many numbers, which
    neighbours share where there are fewer units than ranks."""

    size: int
    is_split: bool = False
    unit: int = 1


AnyAxis = Axis | Sized
WHOLE = frozenset(
    {
        Axis.HIDDEN, Axis.HEAD_DIM, Axis.EXPERTS, Axis.POSITIONS, Axis.TWICE_HIDDEN, Axis.TARGET, Axis.DRAFT_VOCAB,
        Axis.STATE_HEAD_DIM, Axis.STATE_WIDTH, Axis.ONE,
    }
)  # fmt: skip


SPLIT_INPUTS = frozenset({Axis.HEADS, Axis.MLP, Axis.EXPERT_MLP, Axis.SHARED_MLP, Axis.STATE_VALUES})
"""Inputs of row-parallel weights."""


class Layout(NamedTuple):
    """How a checkpoint holds `<name>.weight`: its axes as [out, in], or [out] of a norm; `<name>.bias` has the first.

    `out` may be several axes one below the other. `flipped`: the file holds [in, out]. `depthwise`: [out, 1, in].
    `kernel`, where it is not (): [out, channels, *kernel], all of which but the first are `inner`. `by_state`: `out` takes turns,
    each head of a state's keys having its parts of all its axes together.
    """

    out: tuple[AnyAxis, ...]
    inner: AnyAxis | None = None
    flipped: bool = False
    depthwise: bool = False
    kernel: tuple[int, ...] = ()
    by_state: bool = False


LayoutTable = Mapping[str, Layout]
"""By module name, by its last two parts without numbers ("experts.gate_proj"), which come before it, by a tensor's last part, or by
its whole name; the last ones come first."""


def matrix(out: Axis | tuple[Axis, ...], inner: Axis, *, flipped: bool = False) -> Layout:
    """A weight of two axes."""
    return Layout((out,) if isinstance(out, Axis) else out, inner, flipped)


WEIGHT_AXES: LayoutTable = MappingProxyType(
    {
        "embed_tokens": matrix(Axis.VOCAB, Axis.HIDDEN),
        "lm_head": matrix(Axis.VOCAB, Axis.HIDDEN),
        "norm": Layout((Axis.HIDDEN,)),
        "input_layernorm": Layout((Axis.HIDDEN,)),
        "post_attention_layernorm": Layout((Axis.HIDDEN,)),
        "q_proj": matrix(Axis.HEADS, Axis.HIDDEN),
        "k_proj": matrix(Axis.KV_HEADS, Axis.HIDDEN),
        "v_proj": matrix(Axis.KV_HEADS, Axis.HIDDEN),
        "o_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "q_norm": Layout((Axis.HEAD_DIM,)),
        "k_norm": Layout((Axis.HEAD_DIM,)),
        "gate_proj": matrix(Axis.MLP, Axis.HIDDEN),
        "up_proj": matrix(Axis.MLP, Axis.HIDDEN),
        "down_proj": matrix(Axis.HIDDEN, Axis.MLP),
    }
)
"""The names that Llama began; a family adds its own."""
EXPERT_AXES: LayoutTable = MappingProxyType(
    {
        "gate": matrix(Axis.EXPERTS, Axis.HIDDEN),
        "experts.gate_proj": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "experts.up_proj": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "experts.gate_up_proj": matrix((Axis.EXPERT_MLP, Axis.EXPERT_MLP), Axis.HIDDEN),
        "experts.down_proj": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
        "e_score_correction_bias": Layout((Axis.EXPERTS,)),
    }
)
"""The usual names of experts and their router."""
MIXTRAL_AXES: LayoutTable = MappingProxyType(
    {
        **EXPERT_AXES,
        **dict.fromkeys(("w1", "w3"), matrix(Axis.EXPERT_MLP, Axis.HIDDEN)),
        "w2": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
    }
)
"""Those that Mixtral began."""
_KEYS, _VALUES = Axis.STATE_KEYS, Axis.STATE_VALUES
MAMBA_AXES: LayoutTable = MappingProxyType(
    {
        "mamba": Layout((Axis.STATE_HEADS,)),
        "mamba.in_proj": matrix((_VALUES, _VALUES, _KEYS, _KEYS, Axis.STATE_HEADS), Axis.HIDDEN),
        "mamba.conv1d": Layout((_VALUES, _KEYS, _KEYS), Axis.STATE_WIDTH, depthwise=True),
        "mamba.norm": Layout((_VALUES,)),
        "mamba.out_proj": matrix(Axis.HIDDEN, _VALUES),
    }
)
"""The usual names of Mamba-2."""


def shared_axes(name: str) -> LayoutTable:
    """The layouts of the MLP of this name that all tokens go through beside experts."""
    wide = matrix(Axis.SHARED_MLP, Axis.HIDDEN)
    return {f"{name}.gate_proj": wide, f"{name}.up_proj": wide, f"{name}.down_proj": matrix(Axis.HIDDEN, Axis.SHARED_MLP)}


class HostRanks(Protocol):
    """What ranks that share memory do with plain bytes of it, by address."""

    def sum_at(self, dtype: str, at: int, size_bytes: int) -> None:
        """Values of this dtype become their sums over ranks, as by `all_reduce`."""

    def join_at(self, part: int, joined: int, size_bytes: int, row_bytes: int) -> None:
        """The rows of all ranks' parts, each part of so many bytes, one beside the other in rank order, as by `all_gather`."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of its group.

    `all_reduce(tensor)` gives the sum over ranks, the same bits on each. `all_gather(tensor, dim)` gives the ranks'
    tensors joined along dim in rank order. Either may return its argument changed in place. `can_capture`: both may be part of
    a device's graph. `begin_all_reduce(tensor)` begins the same sum beside the work that follows and returns what ends it, with
    its result; None where nothing goes beside. `beside_rows_min`: from how many rows on products with weights [out, in] are split
    for it, as measured; those with other weights, where a part has `beside_bytes_min`. `host`: the same without tensors; None
    where ranks share no memory. `is_exact`: ranks send a product's sums in float32, before they are rounded.
    `by_expert`: each has whole experts, a share of a layer's, and not a part of each.
    """

    rank: int
    world_size: int
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    all_gather: Callable[[torch.Tensor, int], torch.Tensor]
    can_capture: bool = False
    begin_all_reduce: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = None
    beside_bytes_min: int = 0
    beside_rows_min: Mapping[tuple[int, int], int] = MappingProxyType({})
    host: HostRanks | None = None
    is_exact: bool = True
    by_expert: bool = False

    def goes_beside(self, weight_shape: tuple[int, int], row_count: int, part_bytes: int) -> bool:
        """Whether the sum of one part of a product, of so many bytes, travels while the other is computed. It changes no bit."""
        if self.begin_all_reduce is None:
            return False
        rows_min = self.beside_rows_min.get(weight_shape)
        return part_bytes >= self.beside_bytes_min if rows_min is None else row_count >= rows_min


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The half-open range [start, stop) of an axis that a rank holds, in a space of `size` >= stop - start."""

    start: int
    stop: int
    size: int


def alone() -> Parallel:
    """The group of one rank: both collectives are the identity."""
    return Parallel(rank=0, world_size=1, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)


def weight_axes(config: ModelConfig) -> LayoutTable:
    """The layouts of a model's weights: the usual ones, before which those of its family go."""
    axes = family(config.architecture).WEIGHT_AXES
    return {**WEIGHT_AXES, **EXPERT_AXES, **(axes(config) if callable(axes) else axes)}


def layout_of(name: str, table: LayoutTable = WEIGHT_AXES) -> Layout:
    """The layout of a checkpoint tensor such as "model.layers.0.self_attn.q_proj.weight"."""
    if (own := table.get(name) or table.get(name.rpartition(".")[2])) is not None:
        return own
    *path, module, kind = [part for part in name.split(".") if not part.isdigit()]
    layout = table.get(".".join((*path[-1:], module))) or table[module]
    return Layout(layout.out) if kind == "bias" else layout


def axis_size(axis: AnyAxis, config: ModelConfig) -> int:
    if isinstance(axis, Sized):
        return axis.size
    match axis:
        case Axis.HIDDEN:
            return config.hidden_size
        case Axis.HEAD_DIM:
            return config.head_dim
        case Axis.HEADS:
            return config.head_count * config.head_dim
        case Axis.GATED_HEADS:
            return 2 * config.head_count * config.head_dim
        case Axis.KV_HEADS:
            return config.kv_head_count * config.head_dim
        case Axis.MLP:
            return config.intermediate_size
        case Axis.EXPERTS:
            return config.experts.count if config.experts else 0
        case Axis.EXPERT_MLP:
            return config.experts.intermediate_size if config.experts else 0
        case Axis.SHARED_MLP:
            return config.experts.shared_size if config.experts else 0
        case Axis.VOCAB:
            return config.vocab_size
        case Axis.POSITIONS:
            return config.position_count_max
        case Axis.TWICE_HIDDEN:
            return 2 * config.hidden_size
        case Axis.TARGET:
            return config.head.target_size * config.head.layer_count if config.head else 0
        case Axis.DRAFT_VOCAB:
            return config.head.vocab_size if config.head else 0
        case Axis.ONE:
            return 1
        case Axis.THREE_HEADS:
            return 3 * config.head_count * config.head_dim
        case _:
            return _state_size(axis, config.recurrent) if config.recurrent else 0


def _state_size(axis: Axis, recurrent: Recurrent) -> int:
    sizes = {
        Axis.STATE_KEYS: recurrent.keys,
        Axis.STATE_VALUES: recurrent.values,
        Axis.STATE_HEADS: recurrent.value_heads,
        Axis.STATE_HEAD_DIM: recurrent.value_dim,
        Axis.STATE_WIDTH: recurrent.width,
    }
    return sizes[axis]


def whole_shape(layout: Layout, config: ModelConfig) -> tuple[int, ...]:
    """A whole tensor's shape in its file."""
    shape: tuple[int, ...] = (sum(axis_size(axis, config) for axis in layout.out),)
    if layout.inner is not None:
        inner = axis_size(layout.inner, config)
        if layout.kernel:
            return (*shape, inner // prod(layout.kernel), *layout.kernel)
        shape += (1,) * layout.depthwise + (inner,)
    return shape[::-1] if layout.flipped else shape


def axis_part(axis: AnyAxis, config: ModelConfig, parallel: Parallel) -> Part:
    """This rank's part of an axis. Call `check_world_size` once before."""
    whole, rank, ranks = axis_size(axis, config), parallel.rank, parallel.world_size
    is_whole = not axis.is_split if isinstance(axis, Sized) else axis in WHOLE
    if is_whole or (axis is Axis.EXPERT_MLP and parallel.by_expert):
        return Part(start=0, stop=whole, size=whole)
    unit = axis.unit if isinstance(axis, Sized) else config.head_dim if axis is Axis.KV_HEADS else 1
    if unit > 1:
        count = whole // unit
        size, start = max(1, count // ranks) * unit, rank * count // ranks * unit
        return Part(start=start, stop=start + size, size=size)
    size = -(-whole // ranks)
    start = min(rank * size, whole)
    return Part(start=start, stop=min(start + size, whole), size=size)


def local_heads(config: ModelConfig, world_size: int) -> int:
    return config.head_count // world_size


def local_kv_heads(config: ModelConfig, world_size: int) -> int:
    """Key-value heads on one rank: at least one, shared by neighbours when there are fewer heads than ranks."""
    return max(1, config.kv_head_count // world_size)


def divides(config: ModelConfig, world_size: int) -> bool:
    """Whether heads and the intermediate sizes split evenly over this many ranks."""
    if config.hosted is not None and world_size > 1 and (config.hosted.whole or config.kv_head_count % world_size):
        return False
    few, many = sorted((config.kv_head_count, world_size))
    few_whole, many_whole = sorted((config.whole_heads.kv_head_count, world_size)) if config.whole_heads else (1, 1)
    wide = not any(axis_size(axis, config) % world_size for axis in (Axis.MLP, Axis.EXPERT_MLP, Axis.SHARED_MLP))
    recurrent = config.recurrent
    alike = recurrent is None or recurrent.value_heads % world_size == 0 == recurrent.key_heads % world_size
    shared = many % few == 0 == many_whole % few_whole
    heads = config.head_count % world_size == 0 == without_windows(config).head_count % world_size
    return heads and shared and wide and alike


def shard_count(config: ModelConfig) -> int:
    """Into how many shards the inputs of row-parallel weights are cut, whatever the number of ranks: a power of two if the model
    splits over one, else the least number of ranks over which it does."""
    powers, others = (8, 4, 2), range(3, SHARDS_MAX)
    return next((size for size in (*powers, *others) if divides(config, size) and _keeps_groups(config, size)), 1)


def _keeps_groups(config: ModelConfig, count: int) -> bool:
    """Whether every group of an expert's inputs with one scale stays whole in this number of shards."""
    experts = config.experts
    if experts is None or experts.intermediate_size % experts.whole_group:
        return True
    return experts.intermediate_size // experts.whole_group % count == 0


def sums_alike(config: ModelConfig, world_size: int) -> bool:
    """Whether so many ranks give the bits of one: each has as many whole shards."""
    return shard_count(config) % world_size == 0


def local_shards(config: ModelConfig, parallel: Parallel) -> int:
    """Into how many shards this rank's inputs are cut; one where ranks do not give the bits of one rank."""
    is_exact = parallel.is_exact and sums_alike(config, parallel.world_size)
    return shard_count(config) // parallel.world_size if is_exact else 1


def own_experts(count: int, parallel: Parallel) -> range:
    """The experts that this rank holds, wholly or in part, out of `count`."""
    if not parallel.by_expert:
        return range(count)
    return range(parallel.rank * count // parallel.world_size, (parallel.rank + 1) * count // parallel.world_size)


def shards_of_layout(layout: Layout, config: ModelConfig, parallel: Parallel) -> int:
    """Into how many shards this rank's inputs of a weight are cut."""
    inner = layout.inner
    is_split = inner.is_split if isinstance(inner, Sized) else inner in SPLIT_INPUTS
    shards = local_shards(config, parallel) if is_split else 1
    if inner is not Axis.EXPERT_MLP or not parallel.by_expert or not sums_alike(config, parallel.world_size):
        return shards
    return shards * parallel.world_size if parallel.is_exact else 1


def with_whole_experts(config: ModelConfig, parallel: Parallel) -> Parallel:
    """The same rank with whole experts of the model, where there are several. Raises ModelError where they cannot have such."""
    if parallel.world_size == 1:
        return parallel
    if config.hosted is not None or config.experts is None:
        what = "a model that transformers computes" if config.hosted else "a model without experts"
        raise ModelError(f"--enable-expert-parallel divides experts, and this is {what}: leave it out")
    if config.experts.count < parallel.world_size:
        raise ModelError(
            f"--enable-expert-parallel cannot divide {config.experts.count} experts among {parallel.world_size} ranks: choose a "
            "smaller --tensor-parallel-size"
        )
    return msgspec.structs.replace(parallel, by_expert=True)


def check_world_size(config: ModelConfig, world_size: int) -> None:
    """Raise ModelError, naming the sizes that would do, when the model does not split over this many ranks."""
    if world_size >= 1 and divides(config, world_size):
        return
    if config.hosted is not None and config.hosted.whole:
        raise ModelError(
            f"ranks cannot share a model that transformers computes so: {config.hosted.whole}; leave --tensor-parallel-size out"
        )
    fitting = [str(size) for size in range(1, config.head_count + 1) if divides(config, size)]
    experts = f" (experts: {config.experts.intermediate_size})" if config.experts else ""
    if config.recurrent:
        experts += f" and a state of {config.recurrent.key_heads or config.recurrent.value_heads} heads"
    raise ModelError(
        f"{config.head_count} attention heads, {config.kv_head_count} key-value heads and an intermediate size of "
        f"{config.intermediate_size}{experts} do not split over {world_size} ranks; choose a world size out of "
        f"{', '.join(fitting)}"
    )


class Target(NamedTuple):
    """A packed weight that an adapter may change, and the checkpoint's names of what it is made of, top to bottom."""

    names: tuple[str, ...]
    weight: Any


def may_be_target(layouts: Iterable[Layout]) -> bool:
    """Whether weights of these layouts are linear layers, whose outputs do not take turns, and neither embedding nor head."""
    return all(Axis.VOCAB not in layout.out and layout.inner is not None and not layout.by_state for layout in layouts)
