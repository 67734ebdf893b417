"""Idefics 3 and SmolVLM: SigLIP's tower and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vnext.models.config.json_keys import Json, refuse
from vnext.models.config.model_config import ModelConfig, common_config, text_part
from vnext.models.config.tower_config import parse_tower
from vnext.models.families.towers import siglip
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, own_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Layout, Sized
from vnext.models.layers.tower import Passing, TowerParams, squares

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

ROOT, VISION, CONNECTOR = "model.text_model.", "model.vision_model.", "model.connector.modality_projection."


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    tower = config.tower
    assert tower is not None
    square = Sized(tower.hidden_size * tower.shuffle**2)
    return {**LLAMA, **siglip.axes(tower), "proj": Layout((Sized(tower.width),), square)}


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower. Raises ModelError."""
    text = text_part(raw)
    refuse(text, "sliding_window", unless=())
    config = common_config(text | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}, generation)
    return msgspec.structs.replace(config, tower=parse_tower(raw, config.hidden_size))


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(source, config, own_parts(source, config), Names(root=ROOT))


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    return siglip.assemble(source, config, VISION, source.packed((CONNECTOR + "proj.weight",)), norms=True)


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of a tile: each square of its states is one."""
    assert config.tower is not None
    states = squares(passing, config.tower.shuffle)[0].flatten(1)
    return passing.step.operations.linear(states, params.projection, None)
