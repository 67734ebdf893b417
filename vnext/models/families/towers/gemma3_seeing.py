"""Gemma 3, with SigLIP's tower: an image's tokens see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vnext.kernels.arrays import Array
from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import parse_whole
from vnext.models.families import gemma2
from vnext.models.families.gemma2 import assemble, logits
from vnext.models.families.towers import siglip
from vnext.models.families.towers.llava_onevision import PROJECTORS, TOWERS, present
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, shifted_norm
from vnext.models.layers.sharding import Layout, Sized
from vnext.models.layers.tower import Passing, TowerParams, squares

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "logits", "parse", "project", "tower_config"]

PRODUCT, NORM = "mm_input_projection_weight", "mm_soft_emb_norm"


class Projection(NamedTuple):
    """A norm, and the product that makes a vector of an averaged state."""

    norm: Array
    product: object


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    if (tower := config.tower) is None:
        return gemma2.WEIGHT_AXES
    hidden, width = Sized(tower.hidden_size), Sized(tower.width)
    own = {NORM: Layout((hidden,)), PRODUCT: Layout((width,), hidden, flipped=True)}
    return {**gemma2.WEIGHT_AXES, **siglip.axes(tower), **own}


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower where there is one. Raises ModelError."""
    config = gemma2.parse(raw, generation)
    if not raw.get("vision_config"):
        return config
    return msgspec.structs.replace(config, tower=parse_whole(raw, config.hidden_size))


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    here = present(source, PROJECTORS, PRODUCT)
    projection = Projection(shifted_norm(source, here + NORM), source.packed((here + PRODUCT,)))
    return siglip.assemble(source, config, present(source, TOWERS, "embeddings.patch_embedding.weight"), projection, norms=True)


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of an image: each square of its states is one, by their mean, summed one by one."""
    tower, chosen, (norm, product) = config.tower, passing.step.operations, params.projection
    assert tower is not None
    first, *others = squares(passing, tower.shuffle)[0].unbind(1)
    total = first.float()
    for state in others:
        total = total + state
    return chosen.linear(chosen.rms_norm((total / (1 + len(others))).to(first.dtype), norm, tower.eps), product, None)
