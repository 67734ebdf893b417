"""Ernie 4.5 with experts: softmax with a bias, shared experts; neighbours turn."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, first_layers
from vnext.models.config.json_keys import Json, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.sharding import Axis, matrix, shared_axes

WEIGHT_AXES = MappingProxyType({**shared_axes("shared_experts"), "e_score_correction_bias": matrix(Axis.ONE, Axis.EXPERTS)})
NAMES = ExpertNames(bias="moe_statics.e_score_correction_bias", shared="shared_experts")
DEFAULTS = usual(
    num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True,
    moe_intermediate_size=1536, moe_k=6, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "use_bias", unless=(False,))
    refuse(raw, "moe_norm_min", unless=(1e-12,))
    wide, shared = positive(raw, "moe_intermediate_size"), raw.get("moe_num_shared_experts")
    experts = Experts(
        count=positive(raw, "moe_num_experts"),
        intermediate_size=wide,
        router=Router(positive(raw, "moe_k"), True),
        dense_layers=dense_layers(raw),
        shared_size=wide * positive(raw, "moe_num_shared_experts") if shared else 0,
    )
    return common_config(raw, generation, experts=checked(experts), form=DecoderForm(turns_neighbours=True))


def dense_layers(raw: Json) -> tuple[int, ...]:
    """Layers with a plain MLP: those before moe_layer_start_index or behind moe_layer_end_index, and those between every
    moe_layer_interval-th."""
    count, every = positive(raw, "num_hidden_layers"), positive(raw, "moe_layer_interval", 1)
    before, last = first_layers(raw, "moe_layer_start_index"), raw.get("moe_layer_end_index", -1)
    end = count if last in (-1, None) else last + 1
    return tuple(index for index in range(count) if index in before or index >= end or (index + 1) % every)


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(
        source, config, lambda prefix, index: (attention(source, prefix), any_mlp(source, config, prefix, index, NAMES))
    )
