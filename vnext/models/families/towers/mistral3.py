"""Mistral 3 and Ministral 3, with Pixtral's tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vnext.kernels.arrays import Array
from vnext.models.config.json_keys import Json, refuse
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import parse_rows
from vnext.models.families import mistral
from vnext.models.families.mistral import assemble
from vnext.models.families.towers.llava_onevision import PROJECTORS, present
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, gated, linear, rms_norm
from vnext.models.layers.decoder import forward, logits
from vnext.models.layers.layers import Attention, GatedMlp, Linear
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Axis, Layout, Sized
from vnext.models.layers.tower import Passing, TowerLayer, TowerParams, squares

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

TOWERS = ("vision_tower.", "model.vision_tower.")


class Projection(NamedTuple):
    """A norm, and the product that makes one state of a square; then two products with a gelu between them."""

    norm: Array
    merging: Linear
    first: Linear
    second: Linear


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    if (tower := config.tower) is None:
        return LLAMA
    hidden, width = Sized(tower.hidden_size), Sized(tower.width)
    return {
        **LLAMA,
        **dict.fromkeys(("ln_pre", "attention_norm", "ffn_norm"), Layout((Axis.HIDDEN,))),
        "patch_conv": Layout((Axis.HIDDEN,), Sized(tower.patch_size), kernel=(tower.patch, tower.patch)),
        "multi_modal_projector.norm": Layout((hidden,)),
        "merging_layer": Layout((hidden,), Sized(tower.hidden_size * tower.shuffle**2)),
        "linear_1": Layout((width,), hidden),
        "linear_2": Layout((width,), width),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower where there is one. Raises ModelError."""
    config = mistral.parse(raw, generation)
    if not raw.get("vision_config"):
        return config
    refuse(raw, "vision_feature_layer", unless=(-1,))
    refuse(raw, "projector_hidden_act", unless=("gelu",))
    refuse(raw, "multimodal_projector_bias", unless=(False,))
    return msgspec.structs.replace(config, tower=parse_rows(raw, config.hidden_size, config.rms_norm_eps))


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    root, here = present(source, TOWERS, "patch_conv.weight"), present(source, PROJECTORS, "linear_1.weight")

    def layer(index: int) -> TowerLayer:
        prefix = f"{root}transformer.layers.{index}."
        own, wide = prefix + "attention.", prefix + "feed_forward."
        return TowerLayer(
            rms_norm(source, prefix + "attention_norm"),
            Attention(linear(source, own, "q_proj", "k_proj", "v_proj"), linear(source, own, "o_proj")),
            rms_norm(source, prefix + "ffn_norm"),
            GatedMlp(gated(source, wide, "gate_proj", "up_proj"), linear(source, wide, "down_proj")),
        )

    projection = Projection(
        rms_norm(source, here + "norm"), linear(source, here + "patch_merger.", "merging_layer"),
        linear(source, here, "linear_1"), linear(source, here, "linear_2"),
    )  # fmt: skip
    return TowerParams(
        patches=linear(source, root, "patch_conv"),
        layers=tuple(layer(index) for index in config.layer_numbers),
        projection=projection,
        before=rms_norm(source, root + "ln_pre"),
    )


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of an image: each square of its states is one, whose numbers stand channel by channel."""
    tower, chosen, (norm, merging, first, second) = config.tower, passing.step.operations, params.projection
    assert tower is not None
    states = chosen.rms_norm(passing.states[0], norm, tower.merger_eps)
    cut = squares(passing._replace(states=states[None]), tower.shuffle)[0].transpose(1, 2).flatten(1).contiguous()
    widened = chosen.activate(chosen.linear(chosen.linear(cut, *merging), *first), None, None, "gelu")
    return chosen.linear(widened, *second)
