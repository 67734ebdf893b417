"""MiniMax M2: GLM 4.5's router, norms over all heads, heads that turn in part."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, positive
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.config.rope_config import parse_rope, scaling_of
from vnext.models.layers.assembly import ExpertNames, Source, attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.sharding import EXPERT_AXES, WEIGHT_AXES as LLAMA_AXES, Axis, Layout, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        **EXPERT_AXES,
        "q_norm": Layout((Axis.HEADS,)),
        "k_norm": Layout((Axis.KV_HEADS,)),
        "w1": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "w2": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
        "w3": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
    }
)
NAMES = ExpertNames(("w1", "w3"), "w2", bias="e_score_correction_bias")
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6,
        "num_experts_per_tok": 8, "num_local_experts": 256, "bos_token_id": 200034, "eos_token_id": 200020,
    }
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    head_dim = positive(raw, "head_dim")
    if raw.get("rotary_dim") is not None:
        raw = {"partial_rotary_factor": positive(raw, "rotary_dim") / head_dim} | raw
    experts = Experts(
        count=positive(raw, "num_local_experts"),
        intermediate_size=positive(raw, "intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), True, marks="sigmoid"),
    )
    rope = parse_rope(raw, scaling_of(raw), head_dim, partial=True)
    return common_config(raw, generation, rope=rope, experts=checked(experts), form=DecoderForm(head_norms="all"))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix, head_norms=True),
            sparse_mlp(source, config, prefix + "block_sparse_moe.", NAMES),
        ),
    )
