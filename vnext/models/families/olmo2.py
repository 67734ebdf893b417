"""OLMo 2: norms after attention and MLP, not before; a norm over all query heads together, one over all key heads.

Norm weights multiply in float32 before rounding, so they are kept in float32.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.layers.assembly import Source, attention, gated_mlp, wide_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout

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
NAMES = Names(
    attention_norm="",
    after_attention_norm="post_attention_layernorm",
    mlp_norm="",
    after_mlp_norm="post_feedforward_layernorm",
)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration. Raises ModelError."""
    return common_config(DEFAULTS | raw, generation, form=DecoderForm(head_norms="all"))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""

    def mixing(prefix: str) -> Attention:
        bias, here = config.attention_bias, prefix + "self_attn."
        plain = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        return plain._replace(q_norm=wide_norm(source, here + "q_norm"), k_norm=wide_norm(source, here + "k_norm"))

    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix), gated_mlp(source, prefix)), NAMES, wide_norm
    )
