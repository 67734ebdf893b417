"""GPT-NeoX and Pythia: layer norms, attention and MLP in parallel."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, number, positive, usual
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, DecoderForm, ModelConfig, activation, common_config
from vnext.models.layers.assembly import Source, layer_norm, linear, plain_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, matrix

WEIGHT_AXES = MappingProxyType(
    {
        "embed_in": matrix(Axis.VOCAB, Axis.HIDDEN),
        "embed_out": matrix(Axis.VOCAB, Axis.HIDDEN),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "final_layer_norm"), Layout((Axis.HIDDEN,))),
        "query_key_value": matrix(Axis.THREE_HEADS, Axis.HIDDEN),
        "dense": matrix(Axis.HIDDEN, Axis.HEADS),
        "dense_h_to_4h": matrix(Axis.MLP, Axis.HIDDEN),
        "dense_4h_to_h": matrix(Axis.HIDDEN, Axis.MLP),
    }
)
DEFAULTS = usual(
    hidden_act="gelu", max_position_embeddings=2048, layer_norm_eps=1e-5, use_parallel_residual=True, attention_bias=True,
    rotary_pct=0.25, rotary_emb_base=10000.0,
)  # fmt: skip
NAMES = Names(root="gpt_neox.", embedding="embed_in", norm="final_layer_norm", head="embed_out.weight")


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    turning = {"partial_rotary_factor": number(raw, "rotary_pct"), "rope_theta": number(raw, "rotary_emb_base")}
    heads = positive(raw, "num_attention_heads")
    return common_config(
        turning | raw | {"rms_norm_eps": number(raw, "layer_norm_eps"), "num_key_value_heads": heads},
        generation,
        activation=activation(raw, "hidden_act", PLAIN_ACTIVATIONS),
        partial=True,
        form=DecoderForm(is_parallel=flag(raw, "use_parallel_residual"), is_by_head=True),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    bias = config.attention_bias
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            Attention(
                linear(source, prefix, "attention.query_key_value", bias=bias),
                linear(source, prefix, "attention.dense", bias=bias),
            ),
            plain_mlp(source, prefix + "mlp.", "dense_h_to_4h", "dense_4h_to_h", bias=True),
        ),
        NAMES,
        layer_norm,
    )
