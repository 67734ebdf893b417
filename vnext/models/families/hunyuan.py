"""Hunyuan, dense: norms over heads that have turned."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.layers.assembly import Source, attention, gated_mlp, rms_norm
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {**LLAMA_AXES, **dict.fromkeys(("query_layernorm", "key_layernorm"), Layout((Axis.HEAD_DIM,)))}
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = {"rms_norm_eps": 1e-5} | raw
    refuse(raw, "use_qk_norm", unless=(True,))
    refuse(raw, "use_cla", unless=(False,))
    return common_config(raw, generation, rope=own_rope(raw), form=DecoderForm(head_norms="turned"))


def own_rope(raw: Json) -> Rope:
    """The rope; with `alpha` its base is stretched, whatever the context's length."""
    scaling, usual = scaling_of(raw), positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim", usual)
    if scaling.get("type", scaling.get("rope_type")) == "dynamic" and scaling.get("alpha"):
        theta = number(raw | scaling, "rope_theta", 10000.0) * number(scaling, "alpha") ** (head_dim / (head_dim - 2))
        return Rope(theta=theta)
    return parse_rope(raw, scaling, head_dim)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""

    def mixing(prefix: str) -> Attention:
        bias, here = config.attention_bias, prefix + "self_attn."
        plain = attention(source, prefix, qkv_bias=bias, output_bias=bias)
        return plain._replace(
            q_norm=rms_norm(source, here + "query_layernorm"), k_norm=rms_norm(source, here + "key_layernorm")
        )

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix), gated_mlp(source, prefix)))
