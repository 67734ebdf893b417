"""SmolLM 3: every fourth layer has no positions."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, positive
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.errors import ModelError
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
    windows = ()
    if flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None:
        windows = layer_windows(raw, ["full_attention" if turns else "sliding_attention" for turns in turned])
    still = tuple(index for index, turns in enumerate(turned) if not turns)
    return common_config(raw, generation, windows=windows, still_layers=still)


def turned_layers(raw: Json) -> list[int]:
    """For each layer whether it has positions; the key that says it is called for the opposite."""
    count, interval = positive(raw, "num_hidden_layers"), positive(raw, "no_rope_layer_interval", 4)
    named = raw.get("no_rope_layers")
    if named is None:
        return [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(named, list) or len(named) < count:
        raise ModelError(f"no_rope_layers must be a list with one number for each of {count} layers; correct config.json")
    return named[:count]


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
