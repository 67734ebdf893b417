"""Qwen 3.5 with Qwen3-VL's tower."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.config.rope_config import scaling_of, with_axes
from vnext.models.config.tower_config import parse_deep_grid
from vnext.models.families.hybrids import qwen3_5
from vnext.models.families.hybrids.qwen3_5 import assemble, forward, logits
from vnext.models.families.towers.qwen3_vl import assemble_tower, project, tower_axes, tower_config
from vnext.models.layers.sharding import Layout

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

TOKENS = {"image_token_id": 248056, "video_token_id": 248057}


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    """The layouts of both parts, each by its own configuration."""
    return qwen3_5.WEIGHT_AXES if config.tower is None else {**qwen3_5.WEIGHT_AXES, **tower_axes(config.tower)}


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower where there is one. Raises ModelError."""
    config = qwen3_5.parse(raw, generation)
    if not raw.get("vision_config"):
        return config
    scaling = {"mrope_section": [11, 11, 10], **scaling_of(text_part(raw))}
    rope = with_axes(config.rope, scaling, int(config.head_dim * config.rope.share) // 2, takes_turns=True)
    tower = parse_deep_grid(TOKENS | raw, config.hidden_size, 0, ())
    return msgspec.structs.replace(config, rope=rope, tower=tower)
