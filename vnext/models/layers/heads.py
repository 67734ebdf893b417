"""Heads: what some families do to queries and keys between their product and the cache, where a norm over each head is not all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.arrays import Array
from vnext.kernels.shards import joined_along
from vnext.models.layers.layers import Attention, LayerCache, Linear, ReadingAttention, Step, attend, read, row
from vnext.models.layers.sharding import local_heads

if TYPE_CHECKING:
    import torch


class NarrowPair(NamedTuple):
    """What is added to products that lie side by side: of each the part `wide` makes of a part of what `narrow` makes."""

    narrow: Linear
    wide: tuple[Linear, ...]


class SharedBlock(NamedTuple):
    """Attention and a gated MLP that layers share, of an input normed by `norm` [2 * hidden]. A layer's own are `output`, which is
    whole on every rank, and what is added to the products of attention and MLP, None for nothing."""

    norm: Array
    attention: Attention
    mlp_norm: Array
    gate_up: Linear
    down: Linear
    output: Linear | None = None
    beside_qkv: NarrowPair | None = None
    beside_gate_up: NarrowPair | None = None


def shared_block(block: SharedBlock, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden], beside what the first layer got, through attention, MLP and the layer's own product: [T, hidden]."""
    chosen, eps = step.operations, step.config.rms_norm_eps
    assert block.output is not None and step.own is not None
    step.own[:, : x.shape[1]] = x
    x = chosen.rms_norm(step.own, block.norm, eps)
    attended = attend(_with_narrow(block.attention.qkv, block.beside_qkv, x, step), block.attention, cache, step, None)
    x = chosen.rms_norm(attended, block.mlp_norm, eps)
    gates, ups = _with_narrow(block.gate_up, block.beside_gate_up, x, step).chunk(2, dim=1)
    widened = row(chosen.activate(gates, None, None, step.config.activation) * ups, block.down, step)
    return chosen.linear(widened, block.output.weight, None)


def _with_narrow(layer: Linear, beside: NarrowPair | None, x: torch.Tensor, step: Step) -> torch.Tensor:
    """The products of x with what is added to them."""
    found: torch.Tensor = step.operations.linear(x, layer.weight, None)
    if beside is not None:
        first = 0
        for part, wide in zip(step.operations.linear(x, beside.narrow.weight, None).chunk(len(beside.wide), 1), beside.wide):
            more = step.operations.linear(part, wide.weight, None)
            found[:, first : first + more.shape[1]] += more
            first += more.shape[1]
    return found


def attention(layer: Attention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Self-attention of x [T, hidden]: writes this step's keys and values, then reads the contexts."""
    qkv, layer, gates, step = projected(layer, cache, x, step)
    return attend(qkv, layer, cache, step, gates)


def projected(
    layer: Attention, cache: LayerCache, x: torch.Tensor, step: Step
) -> tuple[torch.Tensor, Attention, torch.Tensor | None, Step]:
    """The queries, keys and values of x [T, hidden] as `attend` takes them, with the layer and the step for what is left to do of
    them, and the gates, None without."""
    qkv = step.operations.linear(x, layer.qkv.weight, layer.qkv.bias)
    form = step.config.form
    gates = None
    if form.is_gated:
        qkv, gates = split_gates(qkv, step)
    if form.is_by_head:
        qkv = qkv.unflatten(1, (-1, 3, step.config.head_dim)).transpose(1, 2).flatten(1)
    if form.values is not None:
        qkv = wide_values(qkv, cache[0].shape[1], *form.values, step.config.head_dim)
    if form.turns_neighbours and step.cosine is not None:
        part_pairs(split_heads(qkv, cache, step), 2 * step.cosine.shape[1])
    if form.head_norms == "all":
        norm_heads_together(qkv, layer, step)
        layer = layer._replace(q_norm=None, k_norm=None)
    elif form.head_norms == "turned" and step.cosine is not None:
        turn(split_heads(qkv, cache, step), step)
        step = step._replace(cosine=None, sine=None)
    if step.query_factors is not None:
        query, _ = split_heads(qkv, cache, step)
        query.copy_(query * step.query_factors[:, None])
    if layer.v_norm is not None:
        values = qkv[:, -cache[0].shape[1] * step.config.head_dim :]
        values.copy_(by_head(values, layer.v_norm, step))
    return qkv, layer, gates, step


def wide_values(qkv: torch.Tensor, kv_heads: int, size: int, scale: float, head_dim: int) -> torch.Tensor:
    """The same, whose values of `size` numbers a head are scaled and as wide as keys: zeros follow."""
    first = qkv.shape[1] - kv_heads * size
    joined = qkv.new_zeros((len(qkv), first + kv_heads * head_dim))
    joined[:, :first] = qkv[:, :first]
    joined[:, first:].unflatten(1, (kv_heads, head_dim))[:, :, :size] = qkv[:, first:].unflatten(1, (kv_heads, size)) * scale
    return joined


def reading_attention(layer: ReadingAttention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Attention of x [T, hidden] to what another layer has written of the same tokens, this step's too."""
    query = by_head(step.operations.linear(x, layer.query.weight, layer.query.bias), layer.q_norm, step)
    heads = query.unflatten(1, (-1, step.config.head_dim))
    if step.cosine is not None:
        turn((heads,), step)
    return row(read(heads, cache, step), layer.output, step)


def by_head(x: torch.Tensor, norm: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, heads * head_dim], each head normed."""
    return step.operations.rms_norm(x.reshape(-1, norm.shape[0]), norm, step.config.rms_norm_eps).view(x.shape)


def split_gates(joined: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, (2 * heads + 2 * kv_heads) * head_dim], each query with its gate behind it, or all queries before all gates ->
    (queries, keys and values; gates)."""
    import torch  # as its callers, which have tensors

    heads, head_dim = local_heads(step.config, step.parallel.world_size), step.config.head_dim
    width = (2 if not step.config.form.gates_heads else 1) * heads * head_dim
    if step.config.form.gates_heads:
        queries, gates = joined[:, :width], joined[:, width : width + heads]
        if step.config.form.softplus_gates:
            gates = softplus(gates)
        return torch.cat((queries, joined[:, width + heads :]), dim=1), gates[:, :, None].expand(-1, -1, head_dim).flatten(1)
    if step.config.form.gates_apart:
        queries, gates = joined[:, :width].unflatten(1, (2, heads, head_dim)).unbind(1)
    else:
        queries, gates = joined[:, :width].unflatten(1, (heads, 2, head_dim)).unbind(2)
    gates = gates.flatten(1)
    rest = torch.cat((queries.flatten(1), joined[:, width:]), dim=1)
    return rest, softplus(gates) if step.config.form.softplus_gates else gates


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in float32, made in float64 and rounded once, for the reason that rope.py gives."""
    wide = x.double()
    return (wide.clamp(min=0.0) + wide.abs().neg().exp().log1p()).float()


def split_heads(qkv: torch.Tensor, cache: LayerCache, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the queries and of the keys [T, heads, head_dim]."""
    heads, kv_heads = qkv.unflatten(1, (-1, step.config.head_dim)), cache[0].shape[1]
    query_count = heads.shape[1] - 2 * kv_heads
    return heads.narrow(1, 0, query_count), heads.narrow(1, query_count, kv_heads)


def part_pairs(parts: Iterable[torch.Tensor], width: int) -> None:
    """In place: of each head's first `width` channels, pairs of neighbours become pairs of halves, which all operations turn."""
    for part in parts:
        turning = part.narrow(2, 0, width)
        turning.copy_(turning.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2))


def turn(parts: Iterable[torch.Tensor], step: Step) -> None:
    """In place: heads [T, heads, head_dim] turn."""
    from vnext.kernels.references import turn as turned  # needs torch

    assert step.cosine is not None and step.sine is not None
    for part in parts:
        part.copy_(turned(part, step.cosine.unsqueeze(1), step.sine.unsqueeze(1)))


def norm_heads_together(qkv: torch.Tensor, layer: Attention, step: Step) -> None:
    """In place: queries and keys of qkv [T, local width] normed over the whole width of all ranks."""
    import torch  # as its callers, which have tensors

    assert layer.q_norm is not None and layer.k_norm is not None
    query_width, key_width = layer.q_norm.shape[0], layer.k_norm.shape[0]
    query, key = qkv.narrow(1, 0, query_width), qkv.narrow(1, query_width, key_width)  # views that autograd lets change
    wide = query.to(torch.float32, copy=True), key.to(torch.float32, copy=True)
    squares = torch.stack([sum_of_heads(part.square(), step.config.head_dim) for part in wide], dim=1)
    # Ranks that share a key head count it once each: the sum over ranks is as many times too large.
    config, ranks = step.config, step.parallel.world_size
    sizes = torch.full((2,), float(key_width * ranks), dtype=torch.float32, device=qkv.device)
    sizes[:1].fill_(config.head_count * config.head_dim)  # sent as arguments: a copy from the host would wait on a GPU
    means = step.parallel.all_reduce(squares) / sizes
    scales = torch.rsqrt(means + config.rms_norm_eps).split(1, dim=1)
    for place, part, scale, weight in zip((query, key), wide, scales, (layer.q_norm, layer.k_norm)):
        place.copy_(part * scale * weight)


def sum_of_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[T, heads * head_dim] -> [T], by one tree for any number of ranks: over a head's numbers, then over the heads."""
    return joined_along(joined_along(x.unflatten(1, (-1, head_dim))))
