"""Latent attention: a token keeps one row for all heads, of which their keys and values are made (arXiv 2405.04434).

One form for prompts and decodes, the absorbed one: what makes keys of a row is multiplied into the query, and what makes values
of it into the result, so that heads attend to rows as they lie in the cache: to one key-value head, whose value is its key. So a
token's bits do not depend on how its request is cut into steps. A row is normed, and its turning part turned, before it is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.kernels.calls import AttentionCall, RotaryWrite
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.assembly import Source, linear
from vnext.models.layers.heads import part_pairs, turn
from vnext.models.layers.layers import LayerCache, Linear, Step, row

if TYPE_CHECKING:
    import torch

EPS = 1e-6
"""Of the norms inside, whatever rms_norm_eps is: as transformers has them."""


class LatentAttention(NamedTuple):
    """`inner`, what queries are made of, then a token's row [.., rank + turning], is whole but for queries made of the input, by
    heads; `query` is column-parallel, None where there is none. Norms [query_rank] and [rank]. `keys` packed [heads, rank, plain],
    `values` packed [heads, value, rank]. `output` is row-parallel. `gates`, column-parallel, are of each head, or None."""

    inner: Linear
    query: Linear | None
    query_norm: Array | None
    norm: Array
    keys: Any
    values: Any
    output: Linear
    gates: Linear | None = None


def assemble_attention(
    source: Source, config: ModelConfig, prefix: str, name: str = "self_attn.", output: str = "o_proj"
) -> LatentAttention:
    """That of the layer at `prefix`, by DeepSeek's names."""
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
    )


def latent_attention(layer: LatentAttention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Self-attention of x [T, hidden]: writes this step's rows, then reads the contexts."""
    gates = layer.gates and step.operations.linear(x, layer.gates.weight, None)
    return attended(layer, cache, written(layer, cache, x, step), step, gates)


def written(layer: LatentAttention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Writes the rows of x [T, hidden] -> the queries [T, heads, rank + turning]."""
    chosen, latent = step.operations, step.config.latent
    assert latent is not None
    joined = chosen.linear(x, layer.inner.weight, layer.inner.bias)
    queries, kept = joined[:, : -latent.width], joined[:, -latent.width :]
    if layer.query is not None:
        queries = chosen.linear(chosen.rms_norm(queries, layer.query_norm, EPS), layer.query.weight, layer.query.bias)
    query = placed(queries.unflatten(1, (-1, latent.plain + latent.turning)), kept, layer, step)
    found: torch.Tensor = chosen.rotary_kv_write(query, RotaryWrite(None, None, EPS, None, None, *cache, step.slots))
    return found


def attended(
    layer: LatentAttention, cache: LayerCache, query: torch.Tensor, step: Step, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """What queries [T, heads, rank + turning] see in their contexts -> [T, hidden]. `gates` [T, heads] or None."""
    chosen, latent = step.operations, step.config.latent
    assert latent is not None
    seen = chosen.paged_attention(query, AttentionCall(*cache, step.metadata, step.scale, step.window))
    found = chosen.head_products(seen[:, :, : latent.rank], layer.values)
    if gates is not None:
        found = chosen.gate_by(found.flatten(0, 1), gates.reshape(-1, 1)).view_as(found)
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
