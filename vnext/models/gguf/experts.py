"""The configurations of models with experts, by what a GGUF file's metadata calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from vnext.models.gguf.members import Members, biased, grouped, multipliers, per_token, rope_of, turning_share, window_of

LATENT = "deepseek2"
"""Whose heads share a row of each token: the numbers of a head mean something else."""


def _qwen_moe(architecture: str) -> Callable[[Members], dict[str, object]]:
    """Qwen 3, whose experts' shares sum to one, or Qwen 2, which has one beside them."""

    def config(members: Members) -> dict[str, object]:
        is_second = architecture == "Qwen2MoeForCausalLM"
        shared = {"shared_expert_intermediate_size": members.number("expert_shared_feed_forward_length")} if is_second else {}
        return {
            "architectures": [architecture],
            "num_experts": members.number("expert_count"),
            "moe_intermediate_size": members.number("expert_feed_forward_length"),
            "norm_topk_prob": not is_second,
        } | shared | per_token(members)

    return config


def _gpt_oss(members: Members) -> dict[str, object]:
    """Its frequencies are stretched between fractions of pairs, whatever llama.cpp does."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": members.number("expert_count"),
        "sliding_window": window_of(members),
        "intermediate_size": members.number("expert_feed_forward_length", members.number("feed_forward_length")),
        "rope_parameters": {**rope_of(members), "truncate": False},
    } | per_token(members)


def _deepseek2(members: Members) -> dict[str, object]:
    """DeepSeek 2 and 3 and what is built as they are, by how experts are marked: 2 stands for sigmoids."""
    turning, query_rank = members.number("rope.dimension_count"), members.number("attention.q_lora_rank", 0)
    keys, values = (f"attention.{each}_length" for each in ("key", "value"))
    sizes: dict[str, object] = {
        "kv_lora_rank": members.number("attention.kv_lora_rank"),
        "q_lora_rank": query_rank or None,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": members.number(keys + "_mla", members.number(keys, 0)) - turning,
        "v_head_dim": members.number(values + "_mla", members.number(values, 0)),
        "num_key_value_heads": members.number("attention.head_count"),
        "rope_parameters": _warm(members),
    }
    if "expert_count" not in members:
        return {"architectures": ["YoutuForCausalLM"]} | sizes
    groups, is_second = members.number("expert_group_count", 1), members.number("expert_gating_func", 1) == 1
    return {
        "architectures": [f"DeepseekV{2 if is_second else 3}ForCausalLM"],
        "topk_method": ("group_limited_greedy" if groups > 1 else "greedy") if is_second else "noaux_tc",
    } | sizes | grouped(members)


def _warm(members: Members) -> dict[str, object]:
    """The rope; by YaRN scores are warmed, by yarn_log_multiplier, a tenth of DeepSeek's mscale_all_dim, and angles are not."""
    rope, warmth = rope_of(members), members.number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] != "yarn":
        return rope
    return rope | {"attention_factor": 1.0} | ({"mscale_all_dim": 10 * warmth} if warmth else {})


def _glm4_moe(members: Members) -> dict[str, object]:
    norms = {"use_qk_norm": members.has("attn_q_norm.weight"), "partial_rotary_factor": turning_share(members)}
    return biased("Glm4MoeForCausalLM")(members) | norms | grouped(members)


def _exaone_moe(members: Members) -> dict[str, object]:
    own = {"num_experts": members.number("expert_count"), "num_shared_experts": members.number("expert_shared_count", 1)}
    return {"architectures": ["ExaoneMoeForCausalLM"], "sliding_window": window_of(members)} | grouped(members) | own


def _afmoe(members: Members) -> dict[str, object]:
    """Its embeddings are scaled, as llama.cpp always does."""
    return {
        "architectures": ["AfmoeForCausalLM"],
        "mup_enabled": True,
        "sliding_window": window_of(members),
        "num_experts": members.number("expert_count"),
        "num_shared_experts": members.number("expert_shared_count", 0),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "num_dense_layers": members.number("leading_dense_block_count", 0),
        "route_scale": members.number("expert_weights_scale", 1.0) or 1.0,
    } | per_token(members)


def _dots1(members: Members) -> dict[str, object]:
    return {"architectures": ["Dots1ForCausalLM"], "sliding_window": None} | grouped(members)


def _minimax_m2(members: Members) -> dict[str, object]:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": members.number("expert_count"),
        "intermediate_size": members.number("expert_feed_forward_length", members.number("feed_forward_length")),
        "rotary_dim": members.number("rope.dimension_count"),
    } | per_token(members)


def _ernie4_5_moe(members: Members) -> dict[str, object]:
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": members.number("expert_count"),
        "moe_k": members.number("expert_used_count"),
        "moe_num_shared_experts": members.number("expert_shared_count", 0),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "moe_layer_start_index": members.number("leading_dense_block_count", 0),
        "moe_layer_interval": members.number("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(members: Members) -> dict[str, object]:
    return {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": members.number("expert_count"),
        "moe_topk": members.number("expert_used_count"),
        "intermediate_size": members.number("expert_feed_forward_length", members.number("feed_forward_length")),
    }


def _olmoe(members: Members) -> dict[str, object]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": members.number("expert_count"),
        "intermediate_size": members.number("expert_feed_forward_length", members.number("feed_forward_length")),
        "clip_qkv": members.number("attention.clamp_kqv") if "attention.clamp_kqv" in members else None,
    } | per_token(members)


def _granite_moe(members: Members) -> dict[str, object]:
    """Granite 3 with experts, also with an MLP that they share."""
    shared = "expert_shared_feed_forward_length"
    beside = {"shared_intermediate_size": members.number(shared)} if members.has("ffn_gate_shexp.weight") else {}
    return {
        "architectures": [f"GraniteMoe{'Shared' * bool(beside)}ForCausalLM"],
        "num_local_experts": members.number("expert_count"),
    } | beside | multipliers(members) | per_token(members)


ARCHITECTURES = MappingProxyType(
    {
        **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _qwen_moe("Qwen3MoeForCausalLM")),
        "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM"),
        "gpt-oss": _gpt_oss,
        LATENT: _deepseek2,
        "glm4moe": _glm4_moe,
        "exaone-moe": _exaone_moe,
        "afmoe": _afmoe,
        "dots1": _dots1,
        "minimax-m2": _minimax_m2,
        "ernie4_5-moe": _ernie4_5_moe,
        "hunyuan-moe": _hunyuan_moe,
        "olmoe": _olmoe,
        "granitemoe": _granite_moe,
    }
)
"""By general.architecture."""
