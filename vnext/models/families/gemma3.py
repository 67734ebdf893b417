"""Gemma 3's text: Gemma 2 with norms over heads, without soft caps.

Five layers of six have a window and a rope of their own. EmbeddingGemma sees to both sides and writes nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from vnext.models.config.json_keys import Defaults, Json, positive
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import ModelConfig, layer_windows, text_part
from vnext.models.config.rope_config import two_ropes
from vnext.models.families.gemma2 import (
    DEFAULTS as GEMMA2_DEFAULTS,
    WEIGHT_AXES,
    assemble_gemma,
    gemma_config,
)
from vnext.models.layers import decoder, encoder
from vnext.models.layers.assembly import Source
from vnext.models.layers.decoder import Params, forward
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS: Defaults = MappingProxyType(
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


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config."""
    if "text_config" in raw:
        raw = text_part(raw)
    raw = DEFAULTS | raw
    count, pattern = positive(raw, "num_hidden_layers"), positive(raw, "sliding_window_pattern")
    kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    theta, local_theta = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    rope, local_rope = two_ropes(raw, positive(raw, "head_dim"), theta, local_theta)
    windows = layer_windows(raw, kinds)
    if not raw.get("use_bidirectional_attention"):
        return gemma_config(raw, generation, windows=windows, rope=rope, local_rope=local_rope)
    raw = raw | {"use_bidirectional_attention": False, "max_position_embeddings": positive(raw, "max_position_embeddings") + 1}
    seen = Encoder(reaches=tuple(window // 2 for window in windows))
    return gemma_config(raw, generation, rope=rope, local_rope=local_rope, encoder=seen)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    root = next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])
    found = assemble_gemma(source, config, root, head_norms=True)
    return found._replace(stack=None) if config.encoder else found


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """The logits of a decoder; those of an encoder are zeros, which no request reads."""
    return (encoder.logits if config.encoder else decoder.logits)(params, hidden, config, parallel)
