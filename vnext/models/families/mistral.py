"""Mistral and Ministral: Llama's architecture; each layer has a sliding window, or those that layer_types names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from vnext.models.config.json_keys import positive
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = MappingProxyType({"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8})


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    usual = "full_attention" if raw["sliding_window"] is None else "sliding_attention"
    return common_config(raw, generation, windows=layer_windows(raw, [usual] * positive(raw, "num_hidden_layers")))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_decoder(
        source, config, lambda prefix, index: (attention(source, prefix), gated_mlp(source, prefix))
    )
