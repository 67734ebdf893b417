"""GLM 4.5 to 4.7, Solar Open, dots.llm1, Hy3: a sigmoid router with a bias, shared experts.

The first layers of GLM, dots and Hy3 have a plain MLP. Half of each head of GLM turns; heads of dots, Hy3, and of large GLMs, are
normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vnext.models.config.expert_keys import dense_kinds, first_layers, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, positive, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows
from vnext.models.layers.assembly import ExpertNames, Source, gated_mlp, own_attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp
from vnext.models.layers.sharding import Axis, Layout, shared_axes

WEIGHT_AXES = MappingProxyType(
    {**shared_axes("shared_experts"), **shared_axes("shared_mlp"), "expert_bias": Layout((Axis.EXPERTS,))}
)
NAMES = ExpertNames(bias="gate.e_score_correction_bias", shared="shared_experts")
HY_NAMES = ExpertNames(router="router.gate", bias="expert_bias", shared="shared_mlp")
DOTS, SOLAR, HY = "Dots1ForCausalLM", "SolarOpenForCausalLM", "HYV3ForCausalLM"
USUAL = usual(
    num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, n_routed_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True,
)  # fmt: skip
DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "Glm4MoeForCausalLM": {
            **USUAL, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
        },
        SOLAR: {**USUAL, "moe_intermediate_size": 1280, "head_dim": 128, "rope_theta": 1e6},
        HY: {
            **USUAL, "moe_intermediate_size": 1536, "head_dim": 128, "rope_theta": 11158840.0, "num_experts": 192,
            "router_scaling_factor": 2.826, "num_shared_experts": 1,
        },
        DOTS: {
            "num_key_value_heads": 32, "moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62,
            "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
        },
    }
)  # fmt: skip
HY_KEYS = usual(
    n_routed_experts="num_experts", n_shared_experts="num_shared_experts", routed_scaling_factor="router_scaling_factor",
)  # fmt: skip
"""DeepSeek's names of what Hy3 names otherwise."""


def parse(raw: Json, generation: Json) -> ModelConfig:
    architecture = raw["architectures"][0]
    raw = DEFAULTS[architecture] | raw
    if architecture == SOLAR:
        raw = raw | {"intermediate_size": positive(raw, "moe_intermediate_size")}
    if architecture == HY:
        raw = raw | {key: raw[own] for key, own in HY_KEYS.items()}
    return common_config(
        raw,
        generation,
        partial=True,
        experts=sigmoid_experts(raw, plain_layers(raw, architecture)),
        windows=later_windows(raw) if architecture == DOTS else (),
        form=DecoderForm(output_bias=architecture in (DOTS, HY) and flag(raw, "attention_bias")),
    )


def plain_layers(raw: Json, architecture: str) -> tuple[int, ...]:
    """The layers without experts. Raises ModelError."""
    if architecture == SOLAR:
        return ()
    return dense_kinds(raw, 1) if architecture == HY else first_layers(raw, "first_k_dense_replace")


def later_windows(raw: Json) -> tuple[int, ...]:
    """Windows of the layers from max_window_layers on, or of those that layer_types names."""
    count, full = positive(raw, "num_hidden_layers"), first_layers(raw, "max_window_layers")
    later = raw.get("sliding_window") is not None
    return layer_windows(raw, [f"{'sliding' if later and index not in full else 'full'}_attention" for index in range(count)])


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.experts is not None
    dense, names = config.experts.dense_layers, HY_NAMES if config.architecture == HY else NAMES

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        if index in dense:
            return gated_mlp(source, prefix, bias=config.mlp_bias)
        return sparse_mlp(source, config, prefix + "mlp.", names)

    def mixing(prefix: str) -> Attention:
        has_norms = f"{prefix}self_attn.q_norm.weight" in source
        return own_attention(source, config, prefix, head_norms=has_norms)

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix), widening(prefix, index)))
