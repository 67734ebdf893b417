"""Compass: Qwen3-VL's tower, Cohere 2."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from vnext.models.config.json_keys import Json, flag
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.config.rope_config import Rope, with_axes
from vnext.models.config.tower_config import parse_deep_grid
from vnext.models.families import cohere
from vnext.models.families.towers.llava_onevision import present
from vnext.models.families.towers.qwen2_5_vl import ROOTS
from vnext.models.families.towers.qwen3_vl import assemble_tower, project, tower_axes
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source
from vnext.models.layers.decoder import Params, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Layout

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

TOKENS = {"image_token_id": 255031, "video_token_id": 255032}


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    return {**LLAMA, **tower_axes(config.tower)} if config.tower else LLAMA


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower; heads turn by time, rows and columns in turn, by sections
    that each kind of layers has. Raises ModelError."""
    text = text_part(raw) | {"architectures": [cohere.COMPASS], "tie_word_embeddings": flag(raw, "tie_word_embeddings")}
    config, ropes = cohere.parse(text, generation), cohere.ropes_of(text)
    full, local = (ropes.get(kind) or ropes.get(other) or {} for kind, other in (cohere.KINDS, cohere.KINDS[::-1]))

    def turned(rope: Rope, scaling: Json) -> Rope:
        return with_axes(rope, {"mrope_section": [24, 20, 20], **scaling}, config.head_dim // 2, takes_turns=True)

    rope, near = turned(config.rope, full), turned(config.local_rope or config.rope, local)
    return replace(
        config,
        architecture=raw["architectures"][0],
        rope=rope,
        local_rope=near if config.windows and near != rope else None,
        tower=replace(parse_deep_grid(TOKENS | raw, config.hidden_size, config.layer_count), marks="capitals"),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    return cohere.assemble(source, config, present(source, ROOTS, "norm.weight"))
