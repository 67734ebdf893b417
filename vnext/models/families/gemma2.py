"""Gemma 1 and 2: scaled embeddings; Gemma 2 has norms on both sides, soft caps, windows in every other layer.

A norm multiplies by 1 + weight, in float32 before rounding: the sum is made once at load and kept in float32. Gemma 3
shares the forward, with a norm over each query and key head and its own rope in the layers with a window.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from vnext.models.config.json_keys import Json, number, positive, refuse
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import Source, attention, gated_mlp, shifted_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout

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
BOTH_SIDES = Names(
    after_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
FIRST = "GemmaForCausalLM"
FIRST_DEFAULTS = MappingProxyType(
    {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    if raw["architectures"][0] == FIRST:
        raw = FIRST_DEFAULTS | raw
        return gemma_config(raw | {"query_pre_attn_scalar": positive(raw, "head_dim")}, generation)
    raw = DEFAULTS | raw
    count = positive(raw, "num_hidden_layers")
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    return gemma_config(raw, generation, windows=layer_windows(raw, kinds))


def gemma_config(raw: Json, generation: Json, **own: Any) -> ModelConfig:
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
    """The parameters under `root`, which ends with a dot. What multiplies the embedding is rounded to the model's dtype."""

    def mixing(prefix: str) -> Attention:
        plain = attention(source, prefix, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        if not head_norms:
            return plain
        query, key = (shifted_norm(source, f"{prefix}self_attn.{name}_norm") for name in "qk")
        return plain._replace(q_norm=query, k_norm=key)

    names = Names() if config.architecture == FIRST else BOTH_SIDES
    names = names._replace(root=root, head=next((name for name in HEADS if name in source), HEADS[0]))
    found = assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix), gated_mlp(source, prefix)), names, shifted_norm
    )
    return found._replace(embedding_scale=float(source.dtype.type(config.hidden_size**0.5)))
