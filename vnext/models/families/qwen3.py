"""Qwen 3: a norm over each query and key head."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig, common_config
from vnext.models.families.qwen2 import DEFAULTS as QWEN2_DEFAULTS, upper_windows
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = MappingProxyType({**QWEN2_DEFAULTS, "head_dim": 128})


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    return common_config(raw, generation, windows=upper_windows(raw))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    bias = config.attention_bias
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix, qkv_bias=bias, output_bias=bias, head_norms=True),
            gated_mlp(source, prefix),
        ),
    )
