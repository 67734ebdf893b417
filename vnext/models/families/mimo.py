"""MiMo: Qwen 2 with layers that draft.

Of these layers the first is read, as in vLLM. It computes a state from the embedding of a token and from the model's hidden state
of the token before, which has not passed the last norm; the model's own head turns it into logits of the token that follows. Behind
the tokens that the model has computed, the layer takes its own normed states. Source of the method: Xiaomi, "MiMo" (2025).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from vnext.kernels.table import operations
from vnext.models.config.json_keys import Json, positive
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.families import qwen2
from vnext.models.families.qwen2 import assemble
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.head_layer import HeadBatch, HeadLayer, run_head_layer
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, matrix

__all__ = ["WEIGHT_AXES", "MtpParams", "assemble", "assemble_mtp", "combine_mtp", "forward_mtp", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **dict.fromkeys(("token_layernorm", "hidden_layernorm", "final_layernorm"), Layout((Axis.HIDDEN,))),
        "input_proj": matrix(Axis.HIDDEN, Axis.TWICE_HIDDEN),
    }
)
COUNT = "num_nextn_predict_layers"
FIRST = "model.mtp_layers.0."


class MtpParams(NamedTuple):
    """The layer that drafts. `project` packed [hidden, 2 * hidden]: first the state, then the embedding."""

    state_norm: torch.Tensor
    embedding_norm: torch.Tensor
    project: Any
    input_norm: torch.Tensor
    layer: HeadLayer


def parse(raw: Json, generation: Json) -> ModelConfig:
    return replace(qwen2.parse(raw, generation), mtp_layers=positive(raw, COUNT) if raw.get(COUNT) else 0)


def assemble_mtp(source: Source, config: ModelConfig) -> MtpParams:
    """The parameters of the layer that drafts. Raises ModelError."""
    if FIRST + "input_proj.weight" not in source:
        raise ModelError(
            f"the checkpoint has no tensors {FIRST}*, which config.json names and method mtp needs: download the model again, or "
            "take another method"
        )
    return MtpParams(
        state_norm=source.fused((FIRST + "hidden_layernorm.weight",)),
        embedding_norm=source.fused((FIRST + "token_layernorm.weight",)),
        project=source.packed((FIRST + "input_proj.weight",)),
        input_norm=source.fused((FIRST + "input_layernorm.weight",)),
        layer=HeadLayer(
            attention=attention(source, FIRST, qkv_bias=True),
            mlp_norm=source.fused((FIRST + "post_attention_layernorm.weight",)),
            mlp=gated_mlp(source, FIRST),
            norm=source.fused((FIRST + "final_layernorm.weight",)),
            frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
        ),
    )


def forward_mtp(params: MtpParams, kv: KvCache, batch: HeadBatch, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the tokens' keys and values, and of those at sample_at give (normed hidden states, states for the next), [S, hidden]
    each, which are the same."""
    chosen, eps = operations(batch.states.device.type), config.rms_norm_eps
    normed = chosen.rms_norm(batch.states, params.state_norm, eps), chosen.rms_norm(batch.embeddings, params.embedding_norm, eps)
    joined = chosen.linear(torch.cat(normed, dim=1), params.project, None)
    hidden, _ = run_head_layer(params.layer, kv, batch.rows, chosen.rms_norm(joined, params.input_norm, eps), joined, config)
    return hidden, hidden


def combine_mtp(params: MtpParams, states: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The model's states [T, 1, hidden], as they are."""
    return states.flatten(1)
