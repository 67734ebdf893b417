"""OLMo Hybrid: gated delta nets, OLMo 3's attention.

One layer of four attends, often without positions. Norms stand behind attention and its MLP, but before delta nets and theirs. All
multiply in float32 before rounding.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, positive, usual
from vnext.models.config.mamba_config import linear_layers, shared, width_of
from vnext.models.config.model_config import DecoderForm, ModelConfig, Recurrent, common_config
from vnext.models.config.rope_config import scaling_of
from vnext.models.layers.assembly import Source, attention, gated_mlp, linear, wide_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.layers import Linear
from vnext.models.layers.recurrent import DeltaNet
from vnext.models.layers.sharding import Axis, Layout, matrix

BEFORE, BEHIND = "attention_layer_norm", "feedforward_layer_norm"
"""Norms of layers with a delta net; transformers writes the second for `post_attention_layernorm` of the other layers, too."""
KEYS, VALUES = Axis.STATE_KEYS, Axis.STATE_VALUES
WEIGHT_AXES = MappingProxyType(
    {
        "q_norm": Layout((Axis.HEADS,)),
        "k_norm": Layout((Axis.KV_HEADS,)),
        **dict.fromkeys(("post_feedforward_layernorm", BEFORE, BEHIND), Layout((Axis.HIDDEN,))),
        **dict.fromkeys(("linear_attn.q_proj", "linear_attn.k_proj"), matrix(KEYS, Axis.HIDDEN)),
        **dict.fromkeys(("linear_attn.v_proj", "linear_attn.g_proj"), matrix(VALUES, Axis.HIDDEN)),
        **dict.fromkeys(("linear_attn.a_proj", "linear_attn.b_proj"), matrix(Axis.STATE_HEADS, Axis.HIDDEN)),
        **dict.fromkeys(("q_conv1d", "k_conv1d"), Layout((KEYS,), Axis.STATE_WIDTH, depthwise=True)),
        "v_conv1d": Layout((VALUES,), Axis.STATE_WIDTH, depthwise=True),
        "linear_attn": Layout((Axis.STATE_HEADS,)),
        "linear_attn.o_norm": Layout((Axis.STATE_HEAD_DIM,)),
        "linear_attn.o_proj": matrix(Axis.HIDDEN, VALUES),
    }
)
NET_NAMES = Names(attention_norm=BEFORE, mlp_norm=BEHIND)
DEFAULTS = usual(max_position_embeddings=65536, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True)
EPS = 1e-5
"""Of the norms behind delta nets, whatever rms_norm_eps is."""


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    count, heads = positive(raw, "num_hidden_layers"), positive(raw, "num_attention_heads")
    usual = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(count)]
    layers, key_heads = linear_layers(raw, usual), positive(raw, "linear_num_key_heads", heads)
    key_dim = positive(raw, "linear_key_head_dim", int(0.75 * positive(raw, "hidden_size") / key_heads))
    recurrent = Recurrent(
        layers=layers,
        width=width_of(raw, "linear_conv_kernel_dim"),
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=positive(raw, "linear_num_value_heads", heads),
        value_dim=positive(raw, "linear_value_head_dim", 2 * key_dim),
        strength_scale=2.0 if flag(raw, "linear_allow_neg_eigval") else 1.0,
        norm_eps=EPS,
    )
    turns = scaling_of(raw).get("rope_theta", raw.get("rope_theta")) is not None
    still = () if turns else tuple(layer for layer in range(count) if layer not in layers)
    return common_config(raw, generation, form=DecoderForm(head_norms="all"), recurrent=shared(recurrent), still_layers=still)


def assemble_net(source: Source, prefix: str) -> DeltaNet:
    """The gated delta net at `prefix`, which ends with a dot."""
    return DeltaNet(
        inner=linear(source, prefix, "q_proj", "k_proj", "v_proj", "g_proj"),
        beside=Linear(source.packed((prefix + "b_proj.weight", prefix + "a_proj.weight"), exact=True), None),
        weight=source.fused(tuple(f"{prefix}{part}_conv1d.weight" for part in "qkv")),
        decay_logs=source.wide(prefix + "A_log"),
        step_bias=source.wide(prefix + "dt_bias"),
        norm=source.wide(prefix + "o_norm.weight"),
        output=linear(source, prefix, "o_proj"),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None
    bias, nets = config.attention_bias, config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index in nets:
            return assemble_net(source, prefix + "linear_attn.")
        plain, here = attention(source, prefix, qkv_bias=bias, output_bias=bias), prefix + "self_attn."
        return plain._replace(q_norm=wide_norm(source, here + "q_norm"), k_norm=wide_norm(source, here + "k_norm"))

    def names(index: int) -> Names:
        if index in nets:
            return NET_NAMES
        behind = BEHIND if f"model.layers.{index}.{BEHIND}.weight" in source else "post_attention_layernorm"
        return Names(
            attention_norm="", after_attention_norm=behind, mlp_norm="", after_mlp_norm="post_feedforward_layernorm"
        )

    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix, index), gated_mlp(source, prefix)), names, wide_norm
    )
