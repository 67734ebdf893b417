"""Gemma 3, text only: Gemma 2 without soft caps and with a norm over each query and key head.

Five layers of six have a window and a rope of their own. Of multimodal models, it serves the language part.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from vnext.models.config.json_keys import positive, required
from vnext.models.config.model_config import ModelConfig, layer_windows
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.families.gemma2 import (
    DEFAULTS as GEMMA2_DEFAULTS,
    WEIGHT_AXES,
    assemble_gemma,
    gemma_config,
)
from vnext.models.layers.assembly import Source
from vnext.models.layers.decoder import Params, forward, logits

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = MappingProxyType(
    {
        **GEMMA2_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
    }
)
ROOTS = ("model.", "model.language_model.", "language_model.model.")


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config."""
    if "text_config" in raw:
        text = {key: value for key, value in required(raw, "text_config", None).items() if value is not None}
        raw = raw | text | {"architectures": raw["architectures"]}
    raw = DEFAULTS | raw
    count, pattern = positive(raw, "num_hidden_layers"), positive(raw, "sliding_window_pattern")
    kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    rope, local_rope = ropes(raw)
    return gemma_config(raw, generation, windows=layer_windows(raw, kinds), rope=rope, local_rope=local_rope)


def ropes(raw: dict[str, Any]) -> tuple[Rope, Rope]:
    """The ropes of layers without and with a window: side by side in rope_parameters, else by older keys."""
    scaling, head_dim = scaling_of(raw), positive(raw, "head_dim")
    if "full_attention" in scaling or "sliding_attention" in scaling:
        full, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    else:
        full, local = scaling, {}
    theta, local_theta = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    return (
        parse_rope(raw | {"rope_theta": theta}, full, head_dim),
        parse_rope(raw | {"rope_theta": local_theta}, local, head_dim),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    root = next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])
    return assemble_gemma(source, config, root, head_norms=True)
