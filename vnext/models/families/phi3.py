"""Phi 3 to 4: fused projections, heads that turn in part, longrope."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, positive, usual
from vnext.models.config.model_config import ModelConfig, common_config, same_window
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.layers.assembly import Source, gated, linear
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention, GatedMlp
from vnext.models.layers.sharding import Axis, matrix

WEIGHT_AXES = MappingProxyType(
    {
        "qkv_proj": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN),
        "gate_up_proj": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
    }
)
DEFAULTS = usual(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    return common_config(raw, generation, windows=same_window(raw), rope=phi_rope(raw))


def phi_rope(raw: Json) -> Rope:
    """The rope; early files call longrope "su" or "yarn"."""
    scaling = scaling_of(raw)
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
        scaling = {**scaling, "rope_type": "longrope"}
    usual = positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    return parse_rope(raw, scaling, positive(raw, "head_dim", usual), partial=True)


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            Attention(linear(source, prefix, "self_attn.qkv_proj"), linear(source, prefix, "self_attn.o_proj")),
            GatedMlp(gated(source, prefix, "mlp.gate_up_proj"), linear(source, prefix, "mlp.down_proj")),
        ),
    )
