"""GLM 4.5 to 4.7, Solar Open, and dots.llm1: experts marked by sigmoids and chosen with a bias, shared ones beside them.

The first layers of GLM and dots have a plain MLP. Half of each head of GLM turns; heads of dots, and of large GLMs, are normed.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.expert_keys import first_layers, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, positive
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import parse_rope, scaling_of
from vnext.models.layers.assembly import ExpertNames, Source, gated_mlp, own_attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention, GatedMlp, SparseMlp
from vnext.models.layers.sharding import EXPERT_AXES, WEIGHT_AXES as LLAMA_AXES, shared_axes

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType({**LLAMA_AXES, **EXPERT_AXES, **shared_axes("shared_experts")})
NAMES = ExpertNames(bias="gate.e_score_correction_bias", shared="shared_experts")
DOTS, SOLAR = "Dots1ForCausalLM", "SolarOpenForCausalLM"
USUAL = MappingProxyType(
    {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    }
)  # fmt: skip
DEFAULTS = MappingProxyType(
    {
        "Glm4MoeForCausalLM": {
            **USUAL, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
        },
        SOLAR: {**USUAL, "moe_intermediate_size": 1280, "head_dim": 128, "rope_theta": 1e6},
        DOTS: {
            "num_key_value_heads": 32, "moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62,
            "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
        },
    }
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    architecture = raw["architectures"][0]
    raw = DEFAULTS[architecture] | raw
    if architecture == SOLAR:
        raw = raw | {"intermediate_size": positive(raw, "moe_intermediate_size")}
    is_dots, usual = architecture == DOTS, positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    return common_config(
        raw,
        generation,
        rope=parse_rope(raw, scaling_of(raw), positive(raw, "head_dim", usual), partial=True),
        experts=sigmoid_experts(raw, () if architecture == SOLAR else first_layers(raw, "first_k_dense_replace")),
        windows=later_windows(raw) if is_dots else (),
        form=DecoderForm(output_bias=is_dots and flag(raw, "attention_bias")),
    )


def later_windows(raw: Json) -> tuple[int, ...]:
    """Windows of the layers from max_window_layers on, or of those that layer_types names."""
    count, first = positive(raw, "num_hidden_layers"), raw.get("max_window_layers")
    later = raw.get("sliding_window") is not None
    return layer_windows(raw, [f"{'sliding' if later and index >= first else 'full'}_attention" for index in range(count)])


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    dense = config.experts.dense_layers

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        return gated_mlp(source, prefix) if index in dense else sparse_mlp(source, config, prefix + "mlp.", NAMES)

    def mixing(prefix: str) -> Attention:
        has_norms = f"{prefix}self_attn.q_norm.weight" in source
        return own_attention(source, config, prefix, head_norms=has_norms)

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix), widening(prefix, index)))
