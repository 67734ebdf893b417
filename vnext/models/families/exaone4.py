"""EXAONE 4: norms behind attention and MLP; layers without a window have no rope."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, positive
from vnext.models.config.model_config import ModelConfig, common_config
from vnext.models.families.olmo2 import NAMES, windows
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, Layout

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType({**LLAMA_AXES, "post_feedforward_layernorm": Layout((Axis.HIDDEN,))})
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; with windows, layers without one have no rope. Raises ModelError."""
    raw = DEFAULTS | raw
    own, count = windows(raw), positive(raw, "num_hidden_layers")
    has_windows = raw.get("sliding_window") is not None
    still = tuple(index for index in range(count) if has_windows and not own[index])
    return common_config(raw, generation, windows=own, still_layers=still)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (attention(source, prefix, head_norms=True), gated_mlp(source, prefix)),
        NAMES,
    )
