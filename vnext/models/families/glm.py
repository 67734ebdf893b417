"""GLM-4 and GLM-4-0414: half of each head turns, by neighbours.

Glm4 also norms what attention and MLP give.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.layers.assembly import Source, gated, linear, own_attention
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import GatedMlp
from vnext.models.layers.sharding import Axis, Layout, matrix

WEIGHT_AXES = MappingProxyType(
    {
        **dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), Layout((Axis.HIDDEN,))),
        "gate_up_proj": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
    }
)
DEFAULTS = usual(
    num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7, attention_bias=True,
    partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338],
)  # fmt: skip
AFTER = Names(after_attention_norm="post_self_attn_layernorm", after_mlp_norm="post_mlp_layernorm")


def parse(raw: Json, generation: Json) -> ModelConfig:
    return common_config(DEFAULTS | raw, generation, partial=True, form=DecoderForm(turns_neighbours=True))


def assemble(source: Source, config: ModelConfig) -> Params:
    def widening(prefix: str) -> GatedMlp:
        return GatedMlp(gated(source, prefix, "mlp.gate_up_proj"), linear(source, prefix, "mlp.down_proj"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (own_attention(source, config, prefix), widening(prefix)),
        AFTER if config.architecture == "Glm4ForCausalLM" else Names(),
    )
