"""Mixtral: Mistral's attention, experts in each layer."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.json_keys import Json, positive
from vnext.models.config.model_config import Experts, ModelConfig, common_config, same_window
from vnext.models.layers.assembly import ExpertNames, Source, attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "gate": matrix(Axis.EXPERTS, Axis.HIDDEN),
        "w1": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "w2": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
        "w3": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
    }
)
NAMES = ExpertNames(("w1", "w3"), "w2")
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    experts = Experts(
        count=positive(raw, "num_local_experts"),
        intermediate_size=positive(raw, "intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), True),
    )
    return common_config(raw, generation, windows=same_window(raw), experts=experts)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix),
            sparse_mlp(source, config, prefix + "block_sparse_moe.", NAMES),
        ),
    )
