"""StarCoder 2 and StableLM: layer norms; heads of StableLM turn in part."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, number, refuse, usual
from vnext.models.config.model_config import (
    PLAIN_ACTIVATIONS,
    DecoderForm,
    ModelConfig,
    activation,
    common_config,
    same_window,
)
from vnext.models.layers.assembly import Source, gated_mlp, layer_norm, own_attention, plain_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import GatedMlp, PlainMlp
from vnext.models.layers.sharding import Axis, matrix

WEIGHT_AXES = MappingProxyType({"c_fc": matrix(Axis.MLP, Axis.HIDDEN), "c_proj": matrix(Axis.HIDDEN, Axis.MLP)})
STARCODER = "Starcoder2ForCausalLM"
STARCODER_DEFAULTS = usual(
    num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-5, use_bias=True,
    tie_word_embeddings=True,
)  # fmt: skip
STABLELM_DEFAULTS = usual(num_key_value_heads=32, max_position_embeddings=4096, layer_norm_eps=1e-5, partial_rotary_factor=0.25)


def parse(raw: Json, generation: Json) -> ModelConfig:
    return (_starcoder if raw["architectures"][0] == STARCODER else _stablelm)(raw, generation)


def _starcoder(raw: Json, generation: Json) -> ModelConfig:
    raw = STARCODER_DEFAULTS | raw
    bias = flag(raw, "use_bias")
    return common_config(
        raw | {"rms_norm_eps": number(raw, "norm_epsilon"), "attention_bias": bias, "mlp_bias": bias},
        generation,
        activation=activation(raw, "hidden_act", PLAIN_ACTIVATIONS),
        windows=same_window(raw),
        form=DecoderForm(output_bias=bias),
    )


def _stablelm(raw: Json, generation: Json) -> ModelConfig:
    raw = STABLELM_DEFAULTS | raw
    refuse(raw, "qk_layernorm", unless=(False,))
    return common_config(
        raw | {"rms_norm_eps": number(raw, "layer_norm_eps"), "attention_bias": flag(raw, "use_qkv_bias")},
        generation,
        partial=True,
        form=DecoderForm(is_parallel=flag(raw, "use_parallel_residual")),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters. Parallel parts share one norm."""

    def widening(prefix: str) -> GatedMlp | PlainMlp:
        if config.architecture == STARCODER:
            return plain_mlp(source, prefix + "mlp.", "c_fc", "c_proj", bias=config.mlp_bias)
        return gated_mlp(source, prefix)

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (own_attention(source, config, prefix), widening(prefix)),
        Names(mlp_norm="") if config.form.is_parallel else Names(),
        layer_norm,
    )
