"""Nomic BERT: BERT with a rope, gated MLPs and no biases."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import ModelConfig, common_config
from vnext.models.layers.assembly import Source, gated, layer_norm, linear
from vnext.models.layers.encoder import EncoderLayer, EncoderParams, forward, logits
from vnext.models.layers.layers import Attention, GatedMlp
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, Sized, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

KEYS = usual(
    n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers", n_inner="intermediate_size",
    n_positions="max_position_embeddings", rotary_emb_base="rope_theta", layer_norm_epsilon="layer_norm_eps",
    activation_function="hidden_act",
)  # fmt: skip
"""What the authors' own files call the members that transformers has."""
DEFAULTS = usual(hidden_act="silu", max_position_embeddings=2048, layer_norm_eps=1e-12, type_vocab_size=2, rope_theta=1000.0)
OTHERS = (
    "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm", "rotary_emb_interleaved", "num_experts", "causal",
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> MappingProxyType[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts, by the modules' names."""
    assert config.encoder is not None
    return MappingProxyType(
        {
            "word_embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
            "token_type_embeddings": Layout((Sized(config.encoder.types),), Axis.HIDDEN),
            "Wqkv": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN),
            "out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
            **dict.fromkeys(("fc11", "fc12"), matrix(Axis.MLP, Axis.HIDDEN)),
            "fc2": matrix(Axis.HIDDEN, Axis.MLP),
            **dict.fromkeys(("emb_ln", "norm1", "norm2"), Layout((Axis.HIDDEN,))),
        }
    )


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | {ours: raw[theirs] for theirs, ours in KEYS.items() if raw.get(theirs) is not None} | raw
    refuse(raw, "hidden_act", unless=("silu", "swiglu"))
    for name in OTHERS:
        refuse(raw, name, unless=(False, 0))
    refuse(raw, "rotary_emb_fraction", unless=(1.0,))
    longest = positive(raw, "max_position_embeddings") + 1
    return common_config(
        raw | {"rms_norm_eps": number(raw, "layer_norm_eps"), "max_position_embeddings": longest, "hidden_act": "silu"},
        generation,
        encoder=Encoder(types=positive(raw, "type_vocab_size")),
    )


def assemble(source: Source, config: ModelConfig) -> EncoderParams:
    """The parameters, by the names of the authors' own files, which transformers writes too."""

    def layer(index: int) -> EncoderLayer:
        here = f"encoder.layers.{index}."
        return EncoderLayer(
            Attention(linear(source, here + "attn.", "Wqkv"), linear(source, here + "attn.", "out_proj")),
            layer_norm(source, here + "norm1"),
            GatedMlp(gated(source, here + "mlp.", "fc12", "fc11"), linear(source, here + "mlp.", "fc2")),
            layer_norm(source, here + "norm2"),
        )

    return EncoderParams(
        embedding=source.table("embeddings.word_embeddings.weight"),
        positions=None,
        types=source.fused(("embeddings.token_type_embeddings.weight",)),
        norm=layer_norm(source, "emb_ln"),
        layers=tuple(layer(index) for index in config.layer_numbers),
        frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
    )
