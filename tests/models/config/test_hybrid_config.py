"""The configurations of hybrids as their authors publish them are read whole, and what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vnext.models.config.model_config import parse_config
from vnext.models.errors import ModelError
from vnext.models.loading.unread import unread_members

LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "initializer_range": 0.02, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True,
    "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 768, "init_method": "mup",
    "intermediate_size": 2048, "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 3, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 32768, "normalization_function": "rmsnorm",
    "num_attention_heads": 12, "num_experts_per_tok": 0, "num_hidden_layers": 4, "num_key_value_heads": 4, "num_local_experts": 0,
    "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 2048, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "video_token_id": 248057,
    "vision_start_token_id": 248053, "vision_end_token_id": 248054, "tie_word_embeddings": True, "vision_config": {"depth": 12},
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
}  # fmt: skip
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
    "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32784,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4,
    "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 40, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_logits_to_keep": 1, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
    "vocab_size": 131072,
}  # fmt: skip


JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1,
    "eos_token_id": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
    "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True, "mamba_proj_bias": False, "max_position_embeddings": 262144,
    "model_type": "jamba", "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM1ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "bos_token_id": None,
    "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10240000, "model_type": "minimax_m1",
    "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "postnorm": True, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "rotary_dim": 64,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
    "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.45.2", "use_cache": True, "vocab_size": 200064,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
    "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
OLMO: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 3840, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_a_log_max": 16.0, "linear_a_log_min": 0.0,
    "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1,
    "linear_dt_min": 0.001, "linear_key_head_dim": 96, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
    "linear_value_head_dim": 192, "max_position_embeddings": 65536, "model_type": "olmo_hybrid", "num_attention_heads": 30,
    "num_hidden_layers": 32, "num_key_value_heads": 30, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
LING: dict[str, Any] = {
    "architectures": ["BailingHybridForCausalLM"], "attention_dropout": 0.0, "eos_token_id": 156895, "first_k_dense_replace": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 6144,
    "kda_lower_bound": -5.0, "kda_safe_gate": True, "kv_lora_rank": 512, "layer_group_size": 6, "max_position_embeddings": 262144,
    "model_type": "bailing_hybrid", "moe_intermediate_size": 768, "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 512, "num_experts_per_tok": 8, "num_hidden_layers": 42, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "pad_token_id": 156892, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_theta": 6000000.0, "routed_scaling_factor": 2.5, "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 4,
    "use_cache": True, "v_head_dim": 128, "vocab_size": 157184,
}  # fmt: skip
LFM3: dict[str, Any] = {
    "architectures": ["Lfm3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 124894, "conv_L_cache": 7,
    "conv_bias": False, "dtype": "bfloat16", "eos_token_id": 124900, "head_dim": 128, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 7680, "max_position_embeddings": 128000, "model_type": "lfm3", "norm_eps": 1e-05, "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 4, "pad_token_id": 124893, "sliding_window": 256, "tie_word_embeddings": True,
    "use_attention_gate": True, "use_cache": True, "use_sandwich_norm": True, "vocab_size": 128000,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "eos_token_id": 0,
    "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1, "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba", "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 48,
    "time_step_scale": 1.0, "torch_dtype": "float32", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip
FALCON_MAMBA: dict[str, Any] = {
    "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 11, "expand": 16,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05,
    "model_type": "falcon_mamba", "num_hidden_layers": 64, "pad_token_id": 11, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mambapy": False, "vocab_size": 65024,
}  # fmt: skip
MIMO: dict[str, Any] = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False, "attention_chunk_size": 128, "attention_dropout": 0.0, "attention_value_scale": 0.707, "head_dim": 192,
    "hidden_act": "silu", "hidden_size": 4096, "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7,
    "initializer_range": 0.02, "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None, "scoring_func": "sigmoid",
    "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000, "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 152576,
}  # fmt: skip
ZAMBA: dict[str, Any] = {"architectures": ["Zamba2ForCausalLM"], "hidden_size": 2560, "num_attention_heads": 32, "vocab_size": 32000}
"""All that is not what transformers assumes."""
PUBLISHED = {"lfm2": LFM2, "granite": GRANITE, "qwen": QWEN, "falcon": FALCON, "nemotron": NEMOTRON, "jamba": JAMBA, "minimax": MINIMAX, "kimi": KIMI, "olmo": OLMO, "ling": LING, "lfm3": LFM3,
    "mamba": MAMBA, "falcon_mamba": FALCON_MAMBA, "mimo": MIMO}  # fmt: skip


@pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED)
def test_all_of_a_published_configuration_is_read(raw: dict[str, Any]) -> None:
    assert unread_members(raw) == []


def test_their_sizes() -> None:
    lfm2, granite, qwen, falcon, nemotron, jamba, minimax, kimi, olmo, ling, lfm3, mamba, second, mimo = (
        parse_config(raw, {}) for raw in PUBLISHED.values()
    )
    assert lfm2.intermediate_size == 4608 and lfm2.attending_layers == (2, 5, 8, 10, 12, 14) and lfm2.tie_embeddings
    assert (lfm2.recurrent.width, lfm2.recurrent.values, lfm2.recurrent.keys) == (3, 1024, 0)
    assert mamba.attending_layers == second.attending_layers == () and mamba.tie_embeddings and not second.tie_embeddings
    assert (mamba.recurrent.values, mamba.recurrent.key_dim, mamba.recurrent.step_rank) == (1536, 16, 48)
    assert (second.recurrent.values, second.recurrent.norm_eps, mamba.recurrent.norm_eps) == (8192, 1e-6, 0.0)
    assert granite.attending_layers == granite.still_layers == (2,) and granite.form.logits_scale == 1 / 3
    assert (granite.recurrent.values, granite.recurrent.keys, granite.recurrent.has_bias) == (1536, 128, True)
    assert qwen.attending_layers == (3,) and qwen.rope.share == 0.25 and qwen.rope.theta == 1e7 and qwen.form.is_gated
    assert falcon.attending_layers == falcon.recurrent.layers == tuple(range(36)) and falcon.recurrent.values == 1536
    assert nemotron.attending_layers == nemotron.still_layers == (14, 21, 30, 39) and nemotron.activation == "relu2"
    assert nemotron.layer_count == 56 and len(nemotron.recurrent.layers) == 27 and nemotron.recurrent.keys == 1024
    assert jamba.attending_layers == jamba.still_layers == (4, 12, 20, 28) and jamba.recurrent.step_rank == 256
    assert (jamba.recurrent.values, jamba.recurrent.keys, jamba.recurrent.key_dim) == (8192, 0, 16)
    assert jamba.experts.dense_layers == tuple(range(0, 32, 2)) and not jamba.experts.router.normalise
    assert minimax.attending_layers == tuple(range(7, 80, 8)) and minimax.rope.share == 0.5 and minimax.recurrent.values == 8192
    assert minimax.form.shares == ((3.5565588200778455, 1.0),) * 3 and minimax.recurrent.width == 1
    assert kimi.attending_layers == kimi.still_layers == (3, 7, 11, 15, 19, 23, 26) and kimi.latent.width == 576
    assert (kimi.recurrent.step_rank, kimi.recurrent.values, kimi.experts.dense_layers) == (128, 4096, (0,))
    assert kimi.position_count_max == 1048576 and kimi.experts.router.scale == 2.446 and kimi.experts.shared_size == 1024
    assert olmo.attending_layers == olmo.still_layers == tuple(range(3, 32, 4)) and olmo.recurrent.strength_scale == 2.0
    assert (olmo.recurrent.keys, olmo.recurrent.values, olmo.recurrent.norm_eps) == (2880, 5760, 1e-5)
    assert ling.attending_layers == (5, 11, 17, 23, 29, 35, 41) and ling.recurrent.bound == -5.0 and ling.recurrent.values == 4096
    assert ling.still_layers == () and ling.rope.theta == 6e6 and ling.experts.dense_layers == (0, 1)
    assert lfm3.attending_layers == tuple(sorted((*range(2, 24, 4), *range(4, 24, 4)))) and lfm3.recurrent.width == 7
    assert lfm3.attending_windows[:4] == (0, 256, 0, 256) and lfm3.rope.theta == 1e6 and lfm3.local_rope.theta == 1e4
    assert (qwen.recurrent.values, qwen.recurrent.keys, qwen.recurrent.width) == (2048, 2048, 4)
    assert mimo.windows[:7] == (0, 129, 129, 129, 129, 0, 129) and mimo.windows.count(0) == 9 and mimo.form.values == (128, 0.707)
    assert (mimo.kv_head_count, mimo.whole_heads.kv_head_count, mimo.experts.dense_layers) == (8, 4, (0,))
    assert (mimo.rope.theta, mimo.local_rope.theta, int(192 * mimo.rope.share), mimo.local_rope.share) == (5e6, 1e4, 64, 0.334)


def test_what_zamba2_leaves_out() -> None:
    zamba = parse_config(ZAMBA, {})
    assert zamba.attending_layers == zamba.still_layers == (6, 12, 18, 24, 30, 36, 42, 47, 51) and zamba.layer_count == 54
    assert (zamba.head_dim, zamba.kv_head_count, zamba.intermediate_size, zamba.activation) == (160, 32, 10240, "gelu")
    assert (zamba.recurrent.values, zamba.recurrent.value_dim, zamba.recurrent.keys) == (5120, 640, 64) and zamba.tie_embeddings
    assert zamba.position_count_max == 4096 and zamba.rms_norm_eps == 1e-5 and zamba.recurrent.blocks.count == 1
    assert parse_config(ZAMBA | {"tie_word_embeddings": False}, {}).recurrent.blocks.count == 9


CONVOLVING = (
    (LFM2, "conv_L_cache"), (LFM3, "conv_L_cache"), (GRANITE, "mamba_d_conv"), (NEMOTRON, "conv_kernel"), (JAMBA, "mamba_d_conv"), (MAMBA, "conv_kernel"),
    (KIMI | {"linear_attn_config": None}, "linear_conv_kernel_dim"), (OLMO, "linear_conv_kernel_dim"), (LING, "linear_conv_kernel_dim"),
    (QWEN["text_config"], "linear_conv_kernel_dim"),
)  # fmt: skip
REFUSED = [
    (ZAMBA, {"layers_block_type": ["mamba"]}, "mamba or linear_attention or hybrid, the last one once at least, but is"),
    (ZAMBA, {"attention_head_dim": 80}, "attention_head_dim 80 is not supported; supported is 160"),
    (ZAMBA, {"hybrid_layer_ids": [3]}, "hybrid_layer_ids .3. is not supported"),
    (ZAMBA, {"use_long_context": True}, "use_long_context True is not supported"),
    (LFM2, {"full_attn_idxs": []}, "layer_types names no layer of full_attention"),
    (LFM2, {"layer_types": ["conv"]}, "layer_types must name full_attention or conv for each of 16 layers"),
    (GRANITE, {"num_local_experts": 8, "num_experts_per_tok": 9}, "8 experts in 1 groups, of which 1 are kept, cannot give each token 9"),
    (GRANITE, {"time_step_limit": [0.0, 0.1]}, "time_step_limit .* is not supported"),
    (GRANITE, {"mamba_n_heads": 7}, "mamba_n_heads must divide 1536, and mamba_n_groups it, but they are 7 and 1"),
    (GRANITE, {"layer_types": ["mamba"] * 4}, "full_attention once at least"),
    (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 numbers"),
    (FALCON, {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate True is not supported"),
    (NEMOTRON, {"hybrid_override_pattern": "M-*E", "n_routed_experts": 1}, "1 experts in 1 groups.* cannot give each token 2"),
    (NEMOTRON, {"hybrid_override_pattern": "M-M-"}, "each of the first two at least once"),
    (JAMBA, {"attn_layer_period": 1, "attn_layer_offset": 0}, "must leave layers that attend and layers that do not"),
    (JAMBA, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms False is not supported"),
    (MAMBA, {"use_bias": True}, "use_bias True is not supported"),
    (MAMBA, {"rms_norm": False}, "rms_norm False is not supported"),
    (MINIMAX, {"attn_type_list": [1] * 80}, "each of the two once at least"),
    (MINIMAX, {"postnorm": False}, "postnorm False is not supported"),
    (KIMI, {"mla_use_nope": False}, "mla_use_nope False is not supported"),
    (LING, {"kda_lower_bound": 0.5}, "kda_lower_bound must be a number below 0 but is 0.5"),
    (LING, {"q_lora_rank": 512}, "q_lora_rank 512 is not supported"),
    (OLMO, {"linear_num_key_heads": 7}, "30 heads of values cannot share 7 heads of keys evenly"),
    *((raw, {key: width}, f"must be 2 to 8 but is {width}") for raw, key in CONVOLVING for width in (1, 9)),
    (LFM3, {"layer_types": [["conv"]] * 24}, "must name sliding_attention or full_attention or conv for each of 24 layers"),
    (LFM3, {"use_sandwich_norm": False}, "use_sandwich_norm False is not supported"),
    (QWEN["text_config"], {"attn_output_gate": False}, "attn_output_gate False is not supported"),
    (QWEN["text_config"], {"linear_num_key_heads": 3}, "16 heads of values cannot share 3 heads of keys evenly"),
    (QWEN["text_config"], {"layer_types": ["full_attention"] * 4}, "each of the two once at least"),
]


@pytest.mark.parametrize(("raw", "changes", "message"), REFUSED)
def test_what_cannot_be_read_is_refused(raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({"architectures": ["Qwen3_5ForCausalLM"]} | raw | changes, {})
