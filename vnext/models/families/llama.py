"""The Llama family: Llama 1 to 3.x, SmolLM and the many models with the same architecture."""

from __future__ import annotations

from typing import Any

from vnext.models.config.json_keys import refuse
from vnext.models.config.model_config import ModelConfig, common_config
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration. Raises ModelError."""
    refuse(raw, "sliding_window", unless=())
    return common_config(raw, generation)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    bias = config.attention_bias
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix, qkv_bias=bias, output_bias=bias),
            gated_mlp(source, prefix, bias=config.mlp_bias),
        ),
    )
