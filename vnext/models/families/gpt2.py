"""GPT-2: learned positions, layer norms, an MLP without a gate.

The fused projection of queries, keys and values is cut into heads as the sharding table says. Norm weights are kept in
float32, in which a layer norm works anyway.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, positive, refuse, usual
from vnext.models.config.model_config import ModelConfig, activation, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, layer_norm, linear, plain_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, matrix

WEIGHT_AXES = MappingProxyType(
    {
        "wte": matrix(Axis.VOCAB, Axis.HIDDEN),
        "lm_head": matrix(Axis.VOCAB, Axis.HIDDEN),
        "wpe": matrix(Axis.POSITIONS, Axis.HIDDEN),
        "ln_1": Layout((Axis.HIDDEN,)),
        "ln_2": Layout((Axis.HIDDEN,)),
        "ln_f": Layout((Axis.HIDDEN,)),
        "attn.c_attn": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN, flipped=True),
        "attn.c_proj": matrix(Axis.HIDDEN, Axis.HEADS, flipped=True),
        "mlp.c_fc": matrix(Axis.MLP, Axis.HIDDEN, flipped=True),
        "mlp.c_proj": matrix(Axis.HIDDEN, Axis.MLP, flipped=True),
    }
)
DEFAULTS = usual(n_positions=1024, activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True)
NAMES = Names(layers="h", embedding="wte", positions="wpe", norm="ln_f", attention_norm="ln_1", mlp_norm="ln_2")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, from GPT-2's own names. Raises ModelError."""
    raw = DEFAULTS | raw
    refuse(raw, "scale_attn_weights", unless=(True,))
    refuse(raw, "scale_attn_by_inverse_layer_idx", unless=(False,))
    refuse(raw, "add_cross_attention", unless=(False,))
    if activation(raw, "activation_function") != "gelu_tanh":
        raise ModelError(f"activation_function {raw['activation_function']!r} is not supported; supported is gelu_new")
    hidden_size = positive(raw, "n_embd")
    named = {
        "hidden_size": hidden_size,
        "num_attention_heads": positive(raw, "n_head"),
        "num_hidden_layers": positive(raw, "n_layer"),
        "intermediate_size": positive(raw, "n_inner", 4 * hidden_size),
        "max_position_embeddings": positive(raw, "n_positions"),
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "hidden_act": raw["activation_function"],
    }
    return common_config(raw | named, generation)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters; the first checkpoints leave the prefix "transformer." out."""
    root = "transformer." if "transformer.wpe.weight" in source else ""

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            Attention(linear(source, prefix, "attn.c_attn", bias=True), linear(source, prefix, "attn.c_proj", bias=True)),
            plain_mlp(source, prefix, "mlp.c_fc", "mlp.c_proj", bias=True),
        ),
        NAMES._replace(root=root),
        layer_norm,
    )
