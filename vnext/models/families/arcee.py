"""Arcee, Apertus, Nemotron and Jais 2: MLPs without a gate, with a square or xIELU.

Apertus also norms each query and key head. Nemotron has layer norms that multiply by 1 + weight, and half of each head turns. Jais
2 has plain ones.
"""

from __future__ import annotations

from types import MappingProxyType

from msgspec.structs import replace

from vnext.models.config.json_keys import Json, number
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, DecoderForm, ModelConfig, activation, common_config
from vnext.models.layers.assembly import Source, layer_norm, own_attention, plain_mlp, rms_norm, shifted_layer_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import PlainMlp
from vnext.models.layers.sharding import Axis, Layout

APERTUS, NEMOTRON, JAIS = "ApertusForCausalLM", "NemotronForCausalLM", "Jais2ForCausalLM"
WEIGHT_AXES = MappingProxyType(
    {**dict.fromkeys(("attention_layernorm", "feedforward_layernorm"), Layout((Axis.HIDDEN,))), "act_fn": Layout((Axis.ONE,))}
)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
DEFAULTS = MappingProxyType(
    {
        "ArceeForCausalLM": {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        APERTUS: {
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6,
            "rope_parameters": LLAMA3,
        },
        NEMOTRON: {
            "hidden_act": "relu2", "norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5,
        },
        JAIS: {
            "hidden_act": "relu2", "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "attention_bias": True,
            "mlp_bias": True,
        },
    }
)  # fmt: skip

NORM_EPS = MappingProxyType({NEMOTRON: "norm_eps", JAIS: "layer_norm_eps"})
NORMS = MappingProxyType({NEMOTRON: shifted_layer_norm, JAIS: layer_norm})


def parse(raw: Json, generation: Json) -> ModelConfig:
    architecture = raw["architectures"][0]
    if raw.get("rope_scaling"):
        raw = {"rope_parameters": None} | raw
    raw = DEFAULTS[architecture] | raw
    is_partial = architecture == NEMOTRON
    if key := NORM_EPS.get(architecture):
        raw = raw | {"rms_norm_eps": number(raw, key)}
    found = common_config(
        raw,
        generation,
        activation=activation(raw, "hidden_act", PLAIN_ACTIVATIONS),
        partial=is_partial,
    )
    return replace(found, form=DecoderForm(output_bias=found.attention_bias))


def assemble(source: Source, config: ModelConfig) -> Params:
    is_apertus, names = config.architecture == APERTUS, Names()
    if is_apertus:
        names = Names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")

    def widening(prefix: str) -> PlainMlp:
        plain = plain_mlp(source, prefix + "mlp.", "up_proj", "down_proj", bias=config.mlp_bias)
        if config.activation != "xielu":
            return plain
        here = prefix + "mlp.act_fn.alpha_"
        return plain._replace(slopes=(source.wide(here + "p"), source.wide(here + "n")))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (own_attention(source, config, prefix, head_norms=is_apertus), widening(prefix)),
        names,
        NORMS.get(config.architecture, rms_norm),
    )
