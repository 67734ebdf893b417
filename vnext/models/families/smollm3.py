"""SmolLM 3: every fourth layer has no positions."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import turned_layers
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    turned = turned_layers(raw)
    windows: tuple[int, ...] = ()
    if flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None:
        windows = layer_windows(raw, ["full_attention" if turns else "sliding_attention" for turns in turned])
    still = tuple(index for index, turns in enumerate(turned) if not turns)
    return common_config(raw, generation, windows=windows, still_layers=still)


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
