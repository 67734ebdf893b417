"""Falcon H1: attention beside Mamba-2; multipliers.

A factor of keys is one of scores; a factor of gates is taken on an MLP's input, and off again behind it.
"""

from __future__ import annotations

from types import MappingProxyType

from msgspec.structs import replace

from vnext.models.config.json_keys import Json, flag, number, numbers, positive, refuse
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import DecoderForm, ModelConfig, Recurrent, common_config
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.decoder_params import SideBySide
from vnext.models.layers.recurrent import assemble_mamba
from vnext.models.layers.sharding import MAMBA_AXES, WEIGHT_AXES as LLAMA_AXES, Axis, Layout

WEIGHT_AXES = MappingProxyType(
    {**LLAMA_AXES, **MAMBA_AXES, "pre_ff_layernorm": Layout((Axis.HIDDEN,)), "final_layernorm": Layout((Axis.HIDDEN,))}
)
DEFAULTS = MappingProxyType(
    {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024}
)
NAMES = Names(mlp_norm="pre_ff_layernorm", norm="final_layernorm")


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    for key in ("projectors_bias", "mlp_bias"):
        refuse(raw, key, unless=(False,))
    gate, down = numbers({"mlp_multipliers": [1.0, 1.0]} | given(raw, "mlp_multipliers"), "mlp_multipliers", 2)
    head_dim = positive(raw, "head_dim", positive(raw, "hidden_size") // positive(raw, "num_attention_heads"))
    form = DecoderForm(
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        logits_scale=number(raw, "lm_head_multiplier", 1.0),
        mlp_scales=(gate, down / gate),
    )
    scale = number(raw, "key_multiplier", 1.0) * head_dim**-0.5
    return common_config(raw, generation, form=form, query_scale=scale, recurrent=side_by_side(raw))


def given(raw: Json, key: str) -> Json:
    """The member of this name alone, if it is there."""
    return {} if raw.get(key) is None else {key: raw[key]}


def side_by_side(raw: Json) -> Recurrent:
    if has_norm := flag(raw, "mamba_rms_norm"):
        refuse({"mamba_norm_before_gate": True} | given(raw, "mamba_norm_before_gate"), "mamba_norm_before_gate", unless=(False,))
    before = number(raw, "ssm_in_multiplier", 1.0)
    scales = numbers({"ssm_multipliers": [1.0] * 5} | given(raw, "ssm_multipliers"), "ssm_multipliers", 5)
    found = mamba_layers(raw, ())
    assert found is not None
    around = [number(raw, key, 1.0) for key in ("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier")]
    return replace(found, has_norm=has_norm, scales=tuple(before * scale for scale in scales), beside=tuple(around))


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> SideBySide:
        attending = attention(source, prefix, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        return SideBySide(attending, assemble_mamba(source, config, prefix + "mamba."))

    return assemble_decoder(
        source, config, lambda prefix, _: (mixing(prefix), gated_mlp(source, prefix, name="feed_forward.")), NAMES
    )
