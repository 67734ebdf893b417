"""SigLIP's tower, which several families share: what its tensors are and how they are called."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import Tower
from vnext.models.layers.assembly import Source, layer_norm, linear, plain_mlp
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, Sized, matrix
from vnext.models.layers.tower import TowerLayer, TowerParams, own_config

AXES = MappingProxyType(
    {
        "out_proj": matrix(Axis.HIDDEN, Axis.HEADS),
        "fc1": matrix(Axis.MLP, Axis.HIDDEN),
        "fc2": matrix(Axis.HIDDEN, Axis.MLP),
        **dict.fromkeys(("layer_norm1", "layer_norm2", "post_layernorm"), Layout((Axis.HIDDEN,))),
    }
)


def axes(tower: Tower) -> dict[str, Layout]:
    return {
        **AXES,
        "patch_embedding": Layout((Axis.HIDDEN,), Sized(tower.patch_size), kernel=(tower.patch, tower.patch)),
        "position_embedding": Layout((Sized(tower.grid**2),), Axis.HIDDEN),
    }


def tower_config(config: ModelConfig) -> ModelConfig:
    """As own_config."""
    assert config.tower is not None
    return own_config(config, config.tower, config.tower.activation, config.tower.grid**2)


def assemble(source: Source, config: ModelConfig, root: str, projection: object, *, norms: bool) -> TowerParams:
    """The parameters under `root`, which ends with a dot; `norms`: whether a norm stands behind the layers."""

    def layer(index: int) -> TowerLayer:
        here = f"{root}encoder.layers.{index}."
        own = here + "self_attn."
        return TowerLayer(
            layer_norm(source, here + "layer_norm1"),
            Attention(linear(source, own, "q_proj", "k_proj", "v_proj", bias=True), linear(source, own, "out_proj", bias=True)),
            layer_norm(source, here + "layer_norm2"),
            plain_mlp(source, here + "mlp.", "fc1", "fc2", bias=True),
        )

    return TowerParams(
        patches=linear(source, root + "embeddings.", "patch_embedding", bias=True),
        layers=tuple(layer(index) for index in config.layer_numbers),
        projection=projection,
        positions=source.fused((root + "embeddings.position_embedding.weight",)),
        norm=layer_norm(source, root + "post_layernorm") if norms else None,
    )
