"""OLMo 2: norms after attention and MLP, not before; a norm over all query heads together, one over all key heads.

Norm weights multiply in float32 before rounding, so they are kept in float32.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vnext.kernels.shards import joined_along
from vnext.models.config.model_config import ModelConfig, common_config
from vnext.models.layers.assembly import Source, attention, embeddings, gated_mlp
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    GatedMlp,
    LayerCache,
    Step,
    attend,
    embed,
    keep_input,
    keep_output,
    layer_steps,
    mlp,
    output_logits,
)
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout, Parallel

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "q_norm": Layout((Axis.HEADS,)),
        "k_norm": Layout((Axis.KV_HEADS,)),
        "post_feedforward_layernorm": Layout((Axis.HIDDEN,)),
    }
)
DEFAULTS = MappingProxyType({"max_position_embeddings": 2048, "rms_norm_eps": 1e-5})


class LayerParams(NamedTuple):
    """One decoder layer; norms are float32, `q_norm` [heads * head_dim] and `k_norm` [kv_heads * head_dim]."""

    attention: Attention
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    after_attention_norm: torch.Tensor
    mlp: GatedMlp
    after_mlp_norm: torch.Tensor


class Params(NamedTuple):
    """One rank's weights."""

    embedding: Any
    layers: tuple[LayerParams, ...]
    norm: torch.Tensor
    head: Any
    frequencies: torch.Tensor


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration. Raises ModelError."""
    return common_config(DEFAULTS | raw, generation)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""

    def layer(prefix: str) -> LayerParams:
        bias = config.attention_bias
        return LayerParams(
            attention=attention(source, prefix, qkv_bias=bias, output_bias=bias),
            q_norm=source.wide(prefix + "self_attn.q_norm.weight"),
            k_norm=source.wide(prefix + "self_attn.k_norm.weight"),
            after_attention_norm=source.wide(prefix + "post_attention_layernorm.weight"),
            mlp=gated_mlp(source, prefix),
            after_mlp_norm=source.wide(prefix + "post_feedforward_layernorm.weight"),
        )

    embedding, head = embeddings(source, config, "model.embed_tokens.weight")
    return Params(
        embedding=embedding,
        layers=tuple(layer(f"model.layers.{index}.") for index in config.layer_numbers),
        norm=source.wide("model.norm.weight"),
        head=head,
        frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    steps = layer_steps(kv, batch, config, parallel, params.frequencies)
    hidden = embed(params.embedding, batch.token_ids, parallel) if batch.states is None else batch.states
    for layer, cache, step in zip(params.layers, kv, steps):
        keep_input(hidden, step)
        hidden = run_layer(layer, cache, hidden, step)
    keep_output(hidden, steps[-1])
    return steps[0].operations.rms_norm(hidden.index_select(0, batch.sample_at), params.norm, config.rms_norm_eps), kv


def run_layer(layer: LayerParams, cache: LayerCache, hidden: torch.Tensor, step: Step) -> torch.Tensor:
    """One layer on the residual stream [T, hidden]."""
    rms_norm, eps = step.operations.rms_norm, step.config.rms_norm_eps
    qkv = step.operations.linear(hidden, layer.attention.qkv.weight, layer.attention.qkv.bias)
    norm_heads(qkv, layer, step)
    hidden = hidden + rms_norm(attend(qkv, layer.attention, cache, step), layer.after_attention_norm, eps)
    return hidden + rms_norm(mlp(layer.mlp, hidden, step), layer.after_mlp_norm, eps)


def norm_heads(qkv: torch.Tensor, layer: LayerParams, step: Step) -> None:
    """In place: queries and keys of qkv [T, local width] normed over the whole width of all ranks."""
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


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    return output_logits(params.head, hidden, config, parallel)
