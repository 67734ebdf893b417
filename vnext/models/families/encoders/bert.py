"""BERT and kin: learned positions, layer norms behind attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, ModelConfig, activation, common_config
from vnext.models.layers.assembly import Source, layer_norm, linear, plain_mlp
from vnext.models.layers.encoder import EncoderLayer, EncoderParams, forward, logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, Sized, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = usual(
    max_position_embeddings=512, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12, pad_token_id=1,
    tie_word_embeddings=True,
)  # fmt: skip
ROOTS = ("", "bert.", "roberta.")
NORM = Layout((Axis.HIDDEN,))
LAYER = MappingProxyType(
    {
        "attention.self.query": matrix(Axis.HEADS, Axis.HIDDEN),
        "attention.self.key": matrix(Axis.KV_HEADS, Axis.HIDDEN),
        "attention.self.value": matrix(Axis.KV_HEADS, Axis.HIDDEN),
        "attention.output.dense": matrix(Axis.HIDDEN, Axis.HEADS),
        "attention.output.LayerNorm": NORM,
        "intermediate.dense": matrix(Axis.MLP, Axis.HIDDEN),
        "output.dense": matrix(Axis.HIDDEN, Axis.MLP),
        "output.LayerNorm": NORM,
    }
)


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts, by the tensors' whole names: two modules of a layer end alike."""
    assert config.encoder is not None
    tables = {
        "word_embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        "position_embeddings": Layout((Sized(config.encoder.positions),), Axis.HIDDEN),
        "token_type_embeddings": Layout((Sized(config.encoder.types),), Axis.HIDDEN),
        "LayerNorm": NORM,
    }
    modules = {f"embeddings.{name}": layout for name, layout in tables.items()}
    for layer in range(config.layer_count):
        modules |= {f"encoder.layer.{layer}.{name}": layout for name, layout in LAYER.items()}
    return {
        f"{root}{name}.{kind}": layout if kind == "weight" else Layout(layout.out)
        for root in ROOTS
        for name, layout in modules.items()
        for kind in ("weight", "bias")
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. RoBERTa's positions begin behind that of the token that pads. Raises ModelError."""
    raw = DEFAULTS | raw
    refuse(raw, "position_embedding_type", unless=("absolute",))
    refuse(raw, "is_decoder", unless=(False,))
    positions = positive(raw, "max_position_embeddings")
    first = 0 if raw["architectures"] == ["BertModel"] else positive(raw, "pad_token_id") + 1
    return common_config(
        raw | {"rms_norm_eps": number(raw, "layer_norm_eps"), "max_position_embeddings": positions - first + 1},
        generation,
        activation=activation(raw, "hidden_act", PLAIN_ACTIVATIONS),
        encoder=Encoder(positions=positions, first_position=first, types=positive(raw, "type_vocab_size")),
    )


def assemble(source: Source, config: ModelConfig) -> EncoderParams:
    """The parameters; of a model that was saved with what stands on it, they begin with a name of their own."""
    root = next((root for root in ROOTS if f"{root}embeddings.word_embeddings.weight" in source), ROOTS[0])
    table = root + "embeddings."

    def layer(index: int) -> EncoderLayer:
        here = f"{root}encoder.layer.{index}."
        return EncoderLayer(
            Attention(
                linear(source, here + "attention.self.", "query", "key", "value", bias=True),
                linear(source, here + "attention.output.", "dense", bias=True),
            ),
            layer_norm(source, here + "attention.output.LayerNorm"),
            plain_mlp(source, here, "intermediate.dense", "output.dense", bias=True),
            layer_norm(source, here + "output.LayerNorm"),
        )

    return EncoderParams(
        embedding=source.table(table + "word_embeddings.weight"),
        positions=source.fused((table + "position_embeddings.weight",)),
        types=source.fused((table + "token_type_embeddings.weight",)),
        norm=layer_norm(source, table + "LayerNorm"),
        layers=tuple(layer(index) for index in config.layer_numbers),
    )
