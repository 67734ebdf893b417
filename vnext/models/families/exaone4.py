"""EXAONE 4, with norms behind attention and MLP, and K-EXAONE, with experts; no rope without a window."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, positive, usual
from vnext.models.config.model_config import Experts, ModelConfig, common_config
from vnext.models.families.olmo2 import NAMES, windows
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.sharding import Axis, Layout, shared_axes

WEIGHT_AXES = MappingProxyType({**shared_axes("shared_experts"), "post_feedforward_layernorm": Layout((Axis.HIDDEN,))})
SPARSE = "ExaoneMoeForCausalLM"
EXPERTS = ExpertNames(bias="e_score_correction_bias", shared="shared_experts")
DEFAULTS = usual(num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096)
EXPERT_DEFAULTS = usual(
    num_experts=64, num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=1024, norm_topk_prob=True,
    routed_scaling_factor=2.5, first_k_dense_replace=1,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; with windows, layers without one have no rope. Raises ModelError."""
    is_sparse = raw["architectures"][0] == SPARSE
    raw = DEFAULTS | (EXPERT_DEFAULTS if is_sparse else {}) | raw
    own, count = windows(raw), positive(raw, "num_hidden_layers")
    has_windows = raw.get("sliding_window") is not None
    still = tuple(index for index in range(count) if has_windows and not own[index])
    experts = own_experts(raw) if is_sparse else None
    return common_config(raw, generation, windows=own, still_layers=still, experts=experts)


def own_experts(raw: Json) -> Experts:
    """The experts, by DeepSeek's keys. Raises ModelError."""
    named = {"n_routed_experts": positive(raw, "num_experts"), "n_shared_experts": positive(raw, "num_shared_experts")}
    return sigmoid_experts(raw | named, dense_kinds(raw, raw["first_k_dense_replace"]))


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (attention(source, prefix, head_norms=True), any_mlp(source, config, prefix, index, EXPERTS)),
        Names() if config.experts else NAMES,
    )
