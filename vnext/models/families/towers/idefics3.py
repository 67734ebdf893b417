"""Idefics 3 and SmolVLM: SigLIP's tower, squares of its states made vectors, and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from vnext.models.config.json_keys import Json, refuse
from vnext.models.config.model_config import ModelConfig, common_config, text_part
from vnext.models.config.tower_config import parse_tower
from vnext.models.layers.assembly import Source, gated_mlp, layer_norm, linear, own_attention, plain_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Axis, Layout, Sized, matrix
from vnext.models.layers.tower import TowerLayer, TowerParams

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "tower_config"]

ROOT, VISION, CONNECTOR = "model.text_model.", "model.vision_model.", "model.connector.modality_projection."
NORM = Layout((Axis.HIDDEN,))
TOWER_AXES = MappingProxyType(
    {
        "out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "fc1": matrix(Axis.MLP, Axis.HIDDEN),
        "fc2": matrix(Axis.HIDDEN, Axis.MLP),
        **dict.fromkeys(("layer_norm1", "layer_norm2", "post_layernorm"), NORM),
    }
)


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts of both parts, each by its own configuration."""
    tower = config.tower
    assert tower is not None
    square = Sized(tower.hidden_size * tower.shuffle**2)
    return {
        **LLAMA,
        **TOWER_AXES,
        "patch_embedding": Layout((Axis.HIDDEN,), Sized(tower.patch_size), kernel=(tower.patch, tower.patch)),
        "position_embedding": Layout((Sized(tower.grid**2),), Axis.HIDDEN),
        "proj": Layout((Sized(tower.width),), square),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower. Raises ModelError."""
    text = text_part(raw)
    refuse(text, "sliding_window", unless=())
    config = common_config(text | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}, generation)
    return msgspec.structs.replace(config, tower=parse_tower(raw, config.hidden_size))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters of the language part."""
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (own_attention(source, config, prefix), gated_mlp(source, prefix, bias=config.mlp_bias)),
        Names(root=ROOT),
    )


def tower_config(config: ModelConfig) -> ModelConfig:
    """The tower as a model of its own, whose weights every rank has whole."""
    tower = config.tower
    assert tower is not None
    return msgspec.structs.replace(
        config, hidden_size=tower.hidden_size, intermediate_size=tower.intermediate_size, layer_count=tower.layer_count,
        head_count=tower.head_count, kv_head_count=tower.head_count, head_dim=tower.hidden_size // tower.head_count,
        rms_norm_eps=tower.eps, activation="gelu_tanh", windows=(), stage=None, position_count_max=tower.grid**2,
    )  # fmt: skip


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    """The parameters of the tower, by its configuration."""

    def layer(index: int) -> TowerLayer:
        here = f"{VISION}encoder.layers.{index}."
        own = here + "self_attn."
        return TowerLayer(
            layer_norm(source, here + "layer_norm1"),
            Attention(linear(source, own, "q_proj", "k_proj", "v_proj", bias=True), linear(source, own, "out_proj", bias=True)),
            layer_norm(source, here + "layer_norm2"),
            plain_mlp(source, here + "mlp.", "fc1", "fc2", bias=True),
        )

    return TowerParams(
        patches=linear(source, VISION + "embeddings.", "patch_embedding", bias=True),
        positions=source.fused((VISION + "embeddings.position_embedding.weight",)),
        layers=tuple(layer(index) for index in config.layer_numbers),
        norm=layer_norm(source, VISION + "post_layernorm"),
        projection=source.packed((CONNECTOR + "proj.weight",)),
    )
