"""Latent attention: a token keeps one row for all heads, of which their keys and values are made (arXiv 2405.04434).

One form for prompts and decodes, the absorbed one: what makes keys of a row is multiplied into the query, and what makes values
of it into the result, so that heads attend to rows as they lie in the cache: to one key-value head, whose value is its key. So a
token's bits do not depend on how its request is cut into steps. A row is normed, and its turning part turned, before it is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.kernels.calls import AttentionCall, RotaryWrite, Selection
from vnext.models.config.layer_kinds import Index, Latent
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.assembly import Source, layer_norm, linear
from vnext.models.layers.heads import part_pairs, turn
from vnext.models.layers.layers import LayerCache, LayerNorm, Linear, Step, row
from vnext.models.layers.sharding import EXPERT_AXES, WEIGHT_AXES, Axis, Layout, LayoutTable, Sized, matrix, shared_axes

if TYPE_CHECKING:
    import torch

EPS = 1e-6
"""Of the norms inside, whatever rms_norm_eps is: as transformers has them."""


class Indexer(NamedTuple):
    """What chooses keys, whole on every rank: `query` packed [heads * dim, query_rank], `key` packed [dim, hidden], whose result is
    normed, and `weights` packed [heads, hidden] of each head."""

    query: Linear
    key: Linear
    norm: LayerNorm
    weights: Linear


class LatentAttention(NamedTuple):
    """`inner`, what queries are made of, then a token's row [.., rank + turning], is whole but for queries made of the input, by
    heads; `query` is column-parallel, None where there is none. Norms [query_rank] and [rank]. `keys` packed [heads, rank, plain],
    `values` packed [heads, value, rank]. `output` is row-parallel. `gates`, column-parallel, are of each head, or None, as
    where they come with queries. `indexer`: None where queries see all, or what the layer before has chosen. `sinks` float32
    [heads], by heads, are scores without a key, or None."""

    inner: Linear
    query: Linear | None
    query_norm: Array | None
    norm: Array
    keys: Any
    values: Any
    output: Linear
    gates: Linear | None = None
    indexer: Indexer | None = None
    sinks: Array | None = None


def index_axes(index: Index, queries: Sized) -> LayoutTable:
    """What chooses keys, whole on every rank, which all choose the same."""
    return {
        "wq_b": Layout((Sized(index.heads * index.dim),), queries),
        "wk": Layout((Sized(index.dim),), Axis.HIDDEN),
        "indexer.k_norm": Layout((Sized(index.dim),)),
        "weights_proj": Layout((Sized(index.heads),), Axis.HIDDEN),
    }


def gate_axes(latent: Latent, heads: int) -> LayoutTable:
    """Gates behind norms, whole on every rank, and those of values, with the queries of their head."""
    both = Sized(heads * (latent.plain + latent.turning + latent.value), is_split=True)
    return {
        "q_b_proj": Layout((both,), Sized(2 * latent.query_rank)),
        "W_down": Layout((Sized(latent.gate_rank),), Axis.HIDDEN),
        "W_up": Layout((Axis.HIDDEN,), Sized(latent.gate_rank)),
    }


def latent_axes(config: ModelConfig) -> LayoutTable:
    """The names that DeepSeek began: queries, keys and values by head, a token's row and what queries are made of whole."""
    latent, heads = config.latent, config.head_count
    assert latent is not None
    rank, queries = Sized(latent.rank), Sized(latent.query_rank)
    by_head = Sized(heads * (latent.plain + latent.turning), is_split=True)
    return {
        **(index_axes(latent.index, queries) if latent.index else {}),
        **WEIGHT_AXES,
        **EXPERT_AXES,
        **shared_axes("shared_experts"),
        "eh_proj": matrix(Axis.HIDDEN, Axis.TWICE_HIDDEN),
        **dict.fromkeys(("enorm", "hnorm"), Layout((Axis.HIDDEN,))),
        "q_proj": Layout((by_head,), Axis.HIDDEN),
        "q_a_proj": Layout((queries,), Axis.HIDDEN),
        "q_a_layernorm": Layout((queries,)),
        "q_b_proj": Layout((by_head,), queries),
        "kv_a_proj_with_mqa": Layout((Sized(latent.width),), Axis.HIDDEN),
        "kv_a_layernorm": Layout((rank,)),
        "kv_b_proj": Layout((Sized(heads * (latent.plain + latent.value), is_split=True),), rank),
        "k_b_proj": Layout((Sized(heads * latent.rank, is_split=True),), Sized(latent.plain)),
        "v_b_proj": Layout((Sized(heads * latent.value, is_split=True),), rank),
        "o_proj": Layout((Axis.HIDDEN,), Sized(heads * latent.value, is_split=True)),
        **(gate_axes(latent, heads) if latent.gate_rank else {}),
    }


def assemble_attention(
    source: Source, config: ModelConfig, prefix: str, name: str = "self_attn.", output: str = "o_proj"
) -> LatentAttention:
    latent, here, bias = config.latent, prefix + name, config.attention_bias
    assert latent is not None
    whole, parts = here + "kv_b_proj.weight", (here + "k_b_proj.weight", here + "v_b_proj.weight")
    is_whole = whole in source or parts[0] not in source
    keys, values = source.by_head((whole,) if is_whole else parts, (latent.plain, latent.value))
    return LatentAttention(
        inner=linear(source, here, "q_a_proj" if latent.query_rank else "q_proj", "kv_a_proj_with_mqa", bias=bias),
        query=linear(source, here, "q_b_proj") if latent.query_rank else None,
        query_norm=source.fused((here + "q_a_layernorm.weight",)) if latent.query_rank else None,
        norm=source.fused((here + "kv_a_layernorm.weight",)),
        keys=keys,
        values=values,
        output=linear(source, here, output, bias=bias),
        indexer=assemble_indexer(source, here + "indexer.") if latent.index and here + "indexer.wk.weight" in source else None,
    )


def assemble_indexer(source: Source, here: str) -> Indexer:
    """That at `here`, which ends with a dot, by DeepSeek's names; a score that is rounded chooses another key."""
    query, key, weights = (
        Linear(source.packed((f"{here}{name}.weight",), exact=True), None) for name in ("wq_b", "wk", "weights_proj")
    )
    return Indexer(query, key, layer_norm(source, here + "k_norm"), weights)


def latent_attention(layer: LatentAttention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Self-attention of x [T, hidden]: writes this step's rows, then reads the contexts."""
    query, selection, gates = written(layer, cache, x, step)
    if layer.gates is not None:
        gates = step.operations.linear(x, layer.gates.weight, None)
    return attended(layer, cache, query, step, gates, selection)


def written(
    layer: LatentAttention, cache: LayerCache, x: torch.Tensor, step: Step
) -> tuple[torch.Tensor, Selection | None, torch.Tensor | None]:
    """Writes the rows of x [T, hidden], and index keys -> (the queries [T, heads, rank + turning], the keys that they see, gates
    [T, heads * value] that come with queries)."""
    chosen, latent = step.operations, step.config.latent
    assert latent is not None
    joined = chosen.linear(x, layer.inner.weight, layer.inner.bias)
    queries, kept = joined[:, : -latent.width], joined[:, -latent.width :]
    selection, gates, size = None, None, latent.plain + latent.turning
    if layer.query is not None:
        inner = chosen.rms_norm(queries, layer.query_norm, EPS)
        given = inner
        if latent.gate_rank:
            given = inner.new_empty((len(inner), 2 * latent.query_rank))
            given[:, : latent.query_rank], given[:, latent.query_rank :] = inner, queries
        queries = chosen.linear(given, layer.query.weight, layer.query.bias)
        selection = selected(layer.indexer, cache, x, inner, step) if latent.index else None
    by_head = queries.unflatten(1, (-1, size + latent.value if latent.gate_rank else size))
    if latent.gate_rank:
        gates = by_head[:, :, size:].flatten(1)
    query = placed(by_head[:, :, :size], kept, layer, step)
    write = RotaryWrite(None, None, EPS, None, None, *rows_of(cache, step), step.slots)
    return chosen.rotary_kv_write(query, write), selection, gates


def rows_of(cache: LayerCache, step: Step) -> LayerCache:
    """The rows of tokens, as keys and as values."""
    assert step.config.latent is not None
    return (cache[0], cache[0]) if step.config.latent.index else cache


def selected(indexer: Indexer | None, cache: LayerCache, x: torch.Tensor, inner: torch.Tensor, step: Step) -> Selection:
    """Writes the index keys of x [T, hidden], whose queries are made of `inner` [T, query_rank] -> which keys they see."""
    chosen, latent, kept = step.operations, step.config.latent, step.chosen
    assert latent is not None and latent.index is not None
    index = latent.index
    if indexer is None:
        assert kept
        return kept[-1]
    joined = x.new_empty((x.shape[0], index.heads + 2, index.dim))
    joined[:, : index.heads] = chosen.linear(inner, *indexer.query).unflatten(1, (-1, index.dim))
    joined[:, index.heads :] = chosen.layer_norm(chosen.linear(x, *indexer.key), *indexer.norm, index.eps)[:, None]
    turning = joined[:, :, -latent.turning :] if index.turns_last else joined
    if index.turns_neighbours:
        part_pairs((turning,), latent.turning)
    if step.cosine is not None:
        turn((turning,), step)
    write = RotaryWrite(None, None, EPS, None, None, cache[1], cache[1], step.slots)
    query = chosen.rotary_kv_write(joined.flatten(1), write)
    found = Selection(query.contiguous(), chosen.logits(x, indexer.weights.weight), cache[1], index.count, [])
    if kept is not None:
        kept[:] = [found]
    return found


def attended(
    layer: LatentAttention, cache: LayerCache, query: torch.Tensor, step: Step, gates: torch.Tensor | None = None,
    selection: Selection | None = None,
) -> torch.Tensor:  # fmt: skip
    """What queries [T, heads, rank + turning] see in their contexts, or of them -> [T, hidden]. `gates` [T, heads], or
    [T, heads * value], or None."""
    chosen, latent = step.operations, step.config.latent
    assert latent is not None
    call = AttentionCall(*rows_of(cache, step), step.metadata, step.scale, step.window, sinks=layer.sinks, selection=selection)
    seen = chosen.paged_attention(query, call)
    found = chosen.head_products(seen[:, :, : latent.rank], layer.values)
    if gates is not None:
        each = gates.reshape(found.shape[0] * found.shape[1], -1)
        found = chosen.gate_by(found.flatten(0, 1), each).view_as(found)
    return row(found.flatten(1), layer.output, step)


def placed(query: torch.Tensor, kept: torch.Tensor, layer: LatentAttention, step: Step) -> torch.Tensor:
    """Queries [T, heads, plain + turning] and rows [T, rank + turning] as the cache takes them: queries of rows, then the rows, as
    keys and as values, [T, (heads + 2) * (rank + turning)]."""
    chosen, latent = step.operations, step.config.latent
    assert latent is not None
    if step.query_factors is not None:
        query = (query * step.query_factors[:, None]).to(query.dtype)
    heads = query.shape[1]
    joined = query.new_empty((query.shape[0], heads + 2, latent.width))
    joined[:, :heads, : latent.rank] = chosen.head_products(query[:, :, : latent.plain], layer.keys)
    joined[:, heads:, : latent.rank] = chosen.rms_norm(kept[:, : latent.rank], layer.norm, EPS)[:, None]
    turning = joined[:, :heads, latent.rank :], joined[:, heads:, latent.rank :]
    for part, given in zip(turning, (query[:, :, latent.plain :], kept[:, None, latent.rank :])):
        part.copy_(given)
    if step.config.form.turns_neighbours:
        part_pairs(turning, latent.turning)
    if step.cosine is not None:
        turn(turning, step)
    return joined.flatten(1)
