"""Gemma 2: norms before and after attention and MLP, soft caps, a window in every other layer, scaled embeddings.

A norm multiplies by 1 + weight, in float32 before rounding: the sum is made once at load and kept in float32. Gemma 3
shares the forward, with a norm over each query and key head and its own rope in the layers with a window.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.config.json_keys import number, positive, refuse
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.layers import fused
from vnext.models.layers.assembly import Source, attention, embeddings, gated_mlp
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder import run_layers
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    GatedMlp,
    LayerCache,
    Step,
    attention as attention_layer,
    embed,
    layer_steps,
    mlp,
    output_logits,
)
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout, Parallel

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "pre_feedforward_layernorm": Layout((Axis.HIDDEN,)),
        "post_feedforward_layernorm": Layout((Axis.HIDDEN,)),
    }
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
DEFAULTS = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
)


class LayerParams(NamedTuple):
    """One decoder layer; norms are float32 with the 1 added."""

    attention_norm: Array
    attention: Attention
    after_attention_norm: Array
    mlp_norm: Array
    mlp: GatedMlp
    after_mlp_norm: Array


class Params(NamedTuple):
    """One rank's weights; `embedding_scale` is rounded to the model's dtype, `local_frequencies` for layers with a window."""

    embedding: Any
    embedding_scale: float
    layers: tuple[LayerParams, ...]
    norm: Array
    head: Any
    frequencies: Array
    local_frequencies: Array | None
    stack: Any = None


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    count = positive(raw, "num_hidden_layers")
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    return gemma_config(raw, generation, windows=layer_windows(raw, kinds))


def gemma_config(raw: dict[str, Any], generation: dict[str, Any], **own: Any) -> ModelConfig:
    """The configuration fields that both versions share."""
    refuse(raw, "use_bidirectional_attention", unless=(False,))
    named = {"hidden_act": raw.get("hidden_activation") or DEFAULTS["hidden_activation"]}
    return common_config(
        raw | named,
        generation,
        query_scale=number(raw, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=number(raw, "attn_logit_softcapping") if raw.get("attn_logit_softcapping") else 0.0,
        logits_softcap=number(raw, "final_logit_softcapping") if raw.get("final_logit_softcapping") else 0.0,
        **own,
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_gemma(source, config, "model.", head_norms=False)


def assemble_gemma(source: Source, config: ModelConfig, root: str, *, head_norms: bool) -> Params:
    """The parameters under `root`, which ends with a dot."""

    def norm(name: str) -> Array:
        return source.wide(name + ".weight") + 1

    def layer(prefix: str) -> LayerParams:
        bias = config.attention_bias
        mixing = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        if head_norms:
            mixing = mixing._replace(
                q_norm=norm(prefix + "self_attn.q_norm"), k_norm=norm(prefix + "self_attn.k_norm")
            )
        return LayerParams(
            attention_norm=norm(prefix + "input_layernorm"),
            attention=mixing,
            after_attention_norm=norm(prefix + "post_attention_layernorm"),
            mlp_norm=norm(prefix + "pre_feedforward_layernorm"),
            mlp=gated_mlp(source, prefix),
            after_mlp_norm=norm(prefix + "post_feedforward_layernorm"),
        )

    lm_head = next((name for name in HEADS if name in source), HEADS[0])
    embedding, head = embeddings(source, config, root + "embed_tokens.weight", lm_head)
    layers = tuple(layer(f"{root}layers.{index}.") for index in config.layer_numbers)
    local = config.local_rope
    return Params(
        embedding=embedding,
        embedding_scale=float(source.dtype.type(config.hidden_size**0.5)),
        layers=layers,
        norm=norm(root + "norm"),
        head=head,
        frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
        local_frequencies=source.place(inverse_frequencies(local, config.head_dim)) if local else None,
        stack=fused.describe(layers, config),
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    steps = layer_steps(kv, batch, config, parallel, params.frequencies, params.local_frequencies)
    if (residual := batch.states) is None:
        residual = embed(params.embedding, batch.token_ids, parallel) * params.embedding_scale
    return run_layers(run_layer, params, kv, residual, steps).index_select(0, batch.sample_at), kv


def run_layer(
    layer: LayerParams,
    cache: LayerCache,
    normed: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    step: Step,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on [T, hidden]: (input of the next layer, already normed; residual stream)."""
    chosen, eps = step.operations, step.config.rms_norm_eps
    mixed = chosen.rms_norm(attention_layer(layer.attention, cache, normed, step), layer.after_attention_norm, eps)
    normed, residual = chosen.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
    widened = chosen.rms_norm(mlp(layer.mlp, normed, step), layer.after_mlp_norm, eps)
    return chosen.add_rms_norm(widened, residual, next_norm, eps)


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], soft-capped, whole on every rank."""
    return output_logits(params.head, hidden, config, parallel)
