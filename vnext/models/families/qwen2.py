"""Qwen 2 and 2.5: biases of queries, keys and values; Qwen 3: norms of heads.

Upper layers have windows if asked.
"""

from __future__ import annotations

from vnext.models.config.expert_keys import first_layers
from vnext.models.config.json_keys import Json, flag, positive, usual
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import Source, llama_parts
from vnext.models.layers.decoder import Params, assemble_decoder

DEFAULTS = usual(num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28)
THIRD = "Qwen3"
"""Its architectures begin with this."""


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | ({"head_dim": 128} if raw["architectures"][0].startswith(THIRD) else {}) | raw
    return common_config(raw, generation, windows=upper_windows(raw))


def upper_windows(raw: Json) -> tuple[int, ...]:
    """Windows of the layers from max_window_layers on, where use_sliding_window is on."""
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window") is None:
        return ()
    full, count = first_layers(raw, "max_window_layers"), positive(raw, "num_hidden_layers")
    return layer_windows(raw, [("full" if index in full else "sliding") + "_attention" for index in range(count)])


def assemble(source: Source, config: ModelConfig) -> Params:
    bias = config.attention_bias
    if config.architecture.startswith(THIRD):
        return assemble_decoder(source, config, llama_parts(source, qkv_bias=bias, output_bias=bias, head_norms=True))
    return assemble_decoder(source, config, llama_parts(source, qkv_bias=True))
