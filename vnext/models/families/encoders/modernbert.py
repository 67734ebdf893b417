"""ModernBERT: two ropes, layers that see 64 tokens around, gated MLPs."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers.assembly import Source, bare_layer_norm, layer_norm, linear, plain_mlp
from vnext.models.layers.decoder import forward
from vnext.models.layers.decoder_params import LayerParams, Params
from vnext.models.layers.encoder import logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        "tok_embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        "Wqkv": matrix((Axis.HEADS, Axis.KV_HEADS, Axis.KV_HEADS), Axis.HIDDEN),
        "attn.Wo": matrix(Axis.HIDDEN, Axis.HEADS),
        "Wi": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
        "mlp.Wo": matrix(Axis.HIDDEN, Axis.MLP),
        **dict.fromkeys(("norm", "attn_norm", "mlp_norm", "final_norm"), Layout((Axis.HIDDEN,))),
    }
)
DEFAULTS = usual(
    max_position_embeddings=8192, norm_eps=1e-5, global_rope_theta=160000.0, local_rope_theta=10000.0,
    global_attn_every_n_layers=3, local_attention=128, tie_word_embeddings=True,
)  # fmt: skip
ROOT = "model."


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "hidden_activation", unless=("gelu",))
    every = positive(raw, "global_attn_every_n_layers")
    kinds = ["sliding_attention" if layer % every else "full_attention" for layer in range(positive(raw, "num_hidden_layers"))]
    reaches = layer_windows(raw | {"sliding_window": positive(raw, "local_attention") // 2}, kinds)
    head_dim = positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    thetas = (number(raw, f"{name}_rope_theta") for name in ("global", "local"))
    rope, local_rope = two_ropes(raw, head_dim, *thetas)
    longest = positive(raw, "max_position_embeddings") + 1
    return common_config(
        raw | {"rms_norm_eps": number(raw, "norm_eps"), "max_position_embeddings": longest},
        generation,
        activation="gated_gelu",
        rope=rope,
        local_rope=local_rope,
        encoder=Encoder(reaches=reaches),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters; the first layer's attention has no norm before it."""
    norm = layer_norm if f"{_at(source, 'final_norm')}.bias" in source else bare_layer_norm

    def layer(index: int) -> LayerParams:
        here = _at(source, f"layers.{index}.mlp.Wi").removesuffix("mlp.Wi")
        attention = Attention(*(linear(source, here + "attn.", name, bias=config.attention_bias) for name in ("Wqkv", "Wo")))
        mlp = plain_mlp(source, here + "mlp.", "Wi", "Wo", bias=config.mlp_bias)
        return LayerParams(norm(source, here + "attn_norm") if index else None, attention, norm(source, here + "mlp_norm"), mlp)

    assert config.local_rope is not None
    return Params(
        embedding=source.table(_at(source, "embeddings.tok_embeddings") + ".weight"),
        layers=tuple(layer(index) for index in config.layer_numbers),
        norm=norm(source, _at(source, "final_norm")),
        head=(),
        frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
        local_frequencies=source.place(inverse_frequencies(config.local_rope, config.head_dim)),
        embedding_norm=norm(source, _at(source, "embeddings.norm")),
    )


def _at(source: Source, name: str) -> str:
    """The whole name of a module, of a model that was saved by itself or with what stands on it."""
    return ROOT + name if f"{ROOT}{name}.weight" in source else name
