"""DeepSeek 2, 3 and R1, Kimi K2, GLM-4.7-Flash, Youtu: latent attention, experts.

DeepSeek 2 marks experts by softmax, the others by sigmoids and choose with a bias; Youtu has none.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked, first_layers, sigmoid_experts
from vnext.models.config.json_keys import Json, flag, number, positive, refuse
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, gated_mlp, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.latent import assemble_attention
from vnext.models.layers.layers import GatedMlp, SparseMlp
from vnext.models.layers.sharding import latent_axes as WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

SECOND, FLASH, YOUTU = "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"
GROUPED = "group_limited_greedy"
SIZES = MappingProxyType(
    {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
USUAL = MappingProxyType(
    {
        **SIZES, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    }
)  # fmt: skip
DEFAULTS = MappingProxyType(
    {
        SECOND: {
            **SIZES, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0, "topk_method": "greedy",
        },
        FLASH: {
            **SIZES, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_routed_experts": 64,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
        },
        YOUTU: {**SIZES, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    }
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    architecture = raw["architectures"][0]
    raw = DEFAULTS.get(architecture, USUAL) | raw
    form = DecoderForm(
        turns_neighbours=architecture == SECOND or flag(raw, "rope_interleave", True),
        output_bias=flag(raw, "attention_bias"),
    )
    return common_config(raw, generation, form=form, experts=experts_of(raw, architecture), **latent_fields(raw))


def experts_of(raw: Json, architecture: str) -> Experts | None:
    """The experts; None in a model that has none."""
    if architecture == YOUTU:
        return None
    refuse(raw, "moe_layer_freq", unless=(1,))
    refuse(raw, "scoring_func", unless=("softmax" if architecture == SECOND else "sigmoid",))
    refuse(raw, "topk_method", unless=("greedy", GROUPED) if architecture == SECOND else ("noaux_tc",))
    if architecture != SECOND:
        return sigmoid_experts(raw, dense_kinds(raw) if architecture == FLASH else first_layers(raw, "first_k_dense_replace"))
    refuse(raw, "norm_topk_prob", unless=(False,))
    groups = (positive(raw, "n_group"), positive(raw, "topk_group")) if raw["topk_method"] == GROUPED else (1, 1)
    count, wide = positive(raw, "n_routed_experts"), positive(raw, "moe_intermediate_size")
    scale = number(raw, "routed_scaling_factor", 1.0)
    router = Router(positive(raw, "num_experts_per_tok"), False, "softmax", scale, *groups, group_best=1)
    dense, shared = first_layers(raw, "first_k_dense_replace"), wide * positive(raw, "n_shared_experts", 1)
    return checked(Experts(count=count, intermediate_size=wide, router=router, dense_layers=dense, shared_size=shared))


def dense_kinds(raw: Json) -> tuple[int, ...]:
    """The layers that mlp_layer_types calls dense, or the first one."""
    count = positive(raw, "num_hidden_layers")
    kinds = raw.get("mlp_layer_types") or ["dense", *["sparse"] * (count - 1)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types must name dense or sparse for each of {count} layers but is {kinds}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    is_marked = config.experts is not None and config.experts.router.marks == "sigmoid"
    names = ExpertNames(bias="gate.e_score_correction_bias" if is_marked else "", shared="shared_experts")

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        if config.experts is None or index in config.experts.dense_layers:
            return gated_mlp(source, prefix)
        return sparse_mlp(source, config, prefix + "mlp.", names)

    return assemble_decoder(
        source, config, lambda prefix, index: (assemble_attention(source, config, prefix), widening(prefix, index))
    )
