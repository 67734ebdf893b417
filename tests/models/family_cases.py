"""Small random models of every family, as transformers makes them: the configurations that parity is tested on."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from checkpoints import save_as_ling, save_as_ling_2

VOCAB_SIZE = 97
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=120,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    n_embd=64,
    n_layer=3,
    n_head=4,
    n_positions=512,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * index for index in range(6)],
    "long_factor": [2.0 + 3.0 * index for index in range(6)],
    "partial_rotary_factor": 0.75,
}
KINDS = {"linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "own": {"rope_type": "default", "rope_theta": 1e4}}


MINISTRAL = {
    **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32,
}  # fmt: skip
NTK = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GROUPED = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0}

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
FINE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
INDEX = {"first_k_dense_replace": 1, "index_topk": 60, "index_head_dim": 16, "index_n_heads": 12}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
SHORT = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of models that have a class only with one, whose texts alone are compared."""


class Case(NamedTuple):
    """A model class and what its configuration has beside BASE. `asked_length`: tokens of the requests it is loaded for. `save`: what
    saves it as a model that transformers has not, whose arithmetic is the same; None for `save_pretrained`."""

    architecture: str
    config: str
    changes: dict[str, Any]
    asked_length: int | None = None
    save: Callable[[torch.nn.Module, Path], None] | None = None


UNSCALED = ("Gemma3nTextConfig", "Gemma4TextConfig", "Gemma4UnifiedTextConfig")
"""Nothing divides their scores by the root of a head's size: weights of norms do, in place of it."""
LIMITED = ("HYV4Config",)
"""Gates and ups of their experts go beyond the limit."""
CASES: dict[str, Case] = {
    "smollm3": Case("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "smollm3_window": Case(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 40, "attention_bias": True},
    ),
    "mistral": Case("MistralForCausalLM", "MistralConfig", {"sliding_window": 40}),
    "ministral": Case(
        "MinistralForCausalLM",
        "MinistralConfig",
        {"head_dim": 16, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral": Case("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_window": Case("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "sliding_window": 40}),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen2_tied_yarn": Case("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2_window": Case(
        "Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 24}),
    "qwen3_bias_yarn": Case(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}},
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"head_dim": 24, "num_experts": 9, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe_mixed": Case(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "mellum": Case(
        "MellumForCausalLM",
        "MellumConfig",
        {
            "head_dim": 24, "num_local_experts": 5, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "flint": Case(
        "FlintForCausalLM",
        "FlintConfig",
        {
            "head_dim": 24, "num_experts": 5, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "sliding_window": 40,
            "shared_expert_intermediate_size": 56, "mlp_only_layers": [1],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mimo_v2": Case(
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "sliding_window": 40, "n_routed_experts": 8,
            "n_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "attention_bias": True, "routed_scaling_factor": 1.5,
        },
    ),
    "laguna": Case(
        "LagunaForCausalLM",
        "LagunaConfig",
        {
            "num_attention_heads_per_layer": [4, 8, 8], "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40,
            "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "moe_routed_scaling_factor": 2.5, "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.5}, "sliding_attention": KINDS["own"]},
        },
    ),
    "laguna_elements": Case(
        "LagunaForCausalLM",
        "LagunaConfig",
        {
            "gating": "per-element", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen2_moe": Case(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "num_experts_per_tok": 2,
            "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2,
        },
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 40,
            "rope_parameters": {**YARN, "rope_theta": 1.5e5, "truncate": False},
        },
    ),
    "olmoe": Case("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}),
    "glm4_moe": Case(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**GROUPED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "ling_2": Case(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**GROUPED, "head_dim": 24, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        save=save_as_ling_2,
    ),
    "ling": Case(
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {
            "num_local_experts": 4, "intermediate_size": 40, "shared_intermediate_size": 80, "attention_multiplier": 0.25,
            "num_key_value_heads": 4,
        },
        save=save_as_ling,
    ),
    "llama4": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 24, "num_hidden_layers": 4, "intermediate_size": 40, "intermediate_size_mlp": 120, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 32, "floor_scale": 100, "attn_scale": 0.3,
            "no_rope_layers": [1, 1, 0, 1],
        },
    ),
    "llama4_whole": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "head_dim": 16, "intermediate_size": 40, "use_qk_norm": False, "floor_scale": 100,
            "attn_scale": 0.3, "no_rope_layers": [1, 0, 1],
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phimoe": Case(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {
            "num_local_experts": 5, "intermediate_size": 40, "router_jitter_noise": 0.2, "lm_head_bias": True, "attention_bias": True,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * index for index in range(8)],
                "long_factor": [2.0 + index for index in range(8)], "short_mscale": 1.2, "long_mscale": 1.4,
                "original_max_position_embeddings": 384,
            },
        },
    ),
    "phimoe_window": Case("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4, "intermediate_size": 40, "sliding_window": 40}),
    "solar_open": Case("SolarOpenForCausalLM", "SolarOpenConfig", {**GROUPED, "head_dim": 24, "n_group": 1}),
    "dots1": Case("Dots1ForCausalLM", "Dots1Config", {**GROUPED, "sliding_window": 40, "max_window_layers": 2}),
    "hy_v3": Case(
        "HYV3ForCausalLM", "HYV3Config", {"head_dim": 24, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    ),
    "afmoe": Case(
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {
            "head_dim": 24, "sliding_window": 40, "global_attn_every_n_layers": 2, "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40, "route_scale": 1.5, "mup_enabled": True,
        },
    ),
    "muse_glimmer": Case(
        "MuseGlimmerForConditionalGeneration",
        "MuseGlimmerConfig",
        {
            "head_dim": 24, "sliding_window": 40, "post_norm_eps": 0.5, "num_hidden_layers": 5, "final_logit_softcapping": 3.0,
            "qk_scale_factor": 1.4,
        },
    ),
    "minimax_m2": Case(
        "MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 12}
    ),
    "ernie_moe": Case(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "tie_word_embeddings": False},
    ),
    "hunyuan_moe": Case(
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {"num_experts": 5, "moe_topk": 2, "head_dim": 24, "rope_parameters": NTK, "intermediate_size": 56},
    ),
    "flex_olmo": Case("FlexOlmoForCausalLM", "FlexOlmoConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {"head_dim": 24}),
    "helium": Case("HeliumForCausalLM", "HeliumConfig", {"head_dim": 16}),
    "gemma2": Case(
        "Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 24, "sliding_window": 40, "attn_logit_softcapping": 5.0}
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": KINDS["linear"], "sliding_attention": KINDS["own"]},
        },
    ),
    "gemma3_short": Case("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16, "sliding_window": 600}),
    "gemma3_caps": Case(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16, "final_logit_softcapping": 20.0, "sliding_window": 17}
    ),
    "gemma4": Case(  # 26B-A4B: experts beside the MLP, few wide heads, keys for values
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
            "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40,
        },
    ),
    "gemma4_shared": Case(  # E2B: inputs by layer, shared caches, wide MLPs above
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 40, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE, "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4_unified": Case(  # 12B
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedTextConfig",
        {
            "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "use_bidirectional_attention": "vision",
        },
    ),
    "gemma3n": Case(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5, "head_dim": 24, "sliding_window": 40, "num_kv_shared_layers": 2, "laurel_rank": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "intermediate_size": [120, 120, 120, 240, 240], "activation_sparsity_pattern": [0.75, 0.5, 0.0, 0.0, 0.9],
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 80, "final_logit_softcapping": 20.0,
        },
    ),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 40}),
    "phi3_longrope": Case(
        "Phi3ForCausalLM", "Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 384}
    ),
    "phi3_longrope_beyond": Case(
        "Phi3ForCausalLM", "Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 512
    ),
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {}),
    "gpt2_inner": Case("GPT2LMHeadModel", "GPT2Config", {"n_inner": 100, "tie_word_embeddings": False}),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", {}),
    "olmo3": Case(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {"sliding_window": 40, "rope_parameters": {"full_attention": YARN, "sliding_attention": KINDS["own"]}},
    ),
    "exaone4": Case(
        "Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": 40, "sliding_window_pattern": 2, "head_dim": 24}
    ),
    "exaone4_whole": Case("Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone_moe": Case(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {
            "sliding_window": 40, "sliding_window_pattern": 2, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1,
        },
    ),
    "ministral3": Case("Ministral3ForCausalLM", "Ministral3Config", {"head_dim": 16, "rope_parameters": MINISTRAL}),
    "granite": Case("GraniteForCausalLM", "GraniteConfig", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granite_swa": Case(
        "GraniteSWAForCausalLM",
        "GraniteSWAConfig",
        {**MULTIPLIERS, "sliding_window": 40, "num_hidden_layers": 5, "layer_rope_theta": [1e6, 1e4, 0, 1e4, 1e6]},
    ),
    "granite_moe_swa": Case(
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSWAConfig",
        {**MULTIPLIERS, "sliding_window": 40, "num_local_experts": 5, "intermediate_size": 40},
    ),
    "hyperclovax": Case("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", {**MULTIPLIERS, "head_dim": 24}),
    "hyperclovax_plain": Case("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", {"use_post_norm": False}),
    "granite_hybrid": Case(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **MULTIPLIERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 120,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "mamba_n_heads": 4,
        },
    ),
    "granite_moe": Case("GraniteMoeForCausalLM", "GraniteMoeConfig", {**MULTIPLIERS, "num_local_experts": 5, "intermediate_size": 40}),
    "granite_moe_shared": Case(
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {**MULTIPLIERS, "num_local_experts": 4, "intermediate_size": 40, "shared_intermediate_size": 56},
    ),
    "seed_oss": Case("SeedOssForCausalLM", "SeedOssConfig", {"head_dim": 24}),
    "ernie": Case("Ernie4_5ForCausalLM", "Ernie4_5Config", {"head_dim": 24, "use_bias": True}),
    "cohere": Case("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere2": Case("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": 40, "sliding_window_pattern": 3}),
    "cohere2_moe": Case(
        "Cohere2MoeForCausalLM",
        "Cohere2MoeConfig",
        {
            "sliding_window": 40, "sliding_window_pattern": 2, "head_dim": 24, "num_experts": 5, "intermediate_size": 40,
            "num_shared_experts": 2, "prefix_dense_intermediate_size": 120, "first_k_dense_replace": 1, "num_hidden_layers": 4,
            "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
        },
    ),
    "cohere2_moe_mean": Case(
        "Cohere2MoeForCausalLM",
        "Cohere2MoeConfig",
        {"head_dim": 16, "num_experts": 5, "intermediate_size": 40, "num_shared_experts": 1, "rms_norm_eps": 1e-5},
    ),
    "cohere_compass": Case(
        "CohereCompassForCausalLM",
        "CohereCompassTextConfig",
        {
            "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True,
            "logit_scale": 0.5, "rope_parameters": {"full_attention": {**YARN, "mscale": 0.7}, "sliding_attention": KINDS["own"]},
        },
    ),
    "cohere_compass_still": Case(
        "CohereCompassForCausalLM",
        "CohereCompassTextConfig",
        {
            "sliding_window": 40, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": None, "sliding_attention": KINDS["own"]},
        },
    ),
    "glm": Case("GlmForCausalLM", "GlmConfig", {"head_dim": 24}),
    "glm4": Case("Glm4ForCausalLM", "Glm4Config", {"head_dim": 16, "attention_bias": False}),
    "hunyuan": Case("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {"head_dim": 24, "rope_parameters": NTK}),
    "arcee": Case("ArceeForCausalLM", "ArceeConfig", {"rope_parameters": YARN, "mlp_bias": True}),
    "apertus": Case("ApertusForCausalLM", "ApertusConfig", {}),
    "nemotron": Case("NemotronForCausalLM", "NemotronConfig", {"head_dim": 24, "rope_parameters": HALF}),
    "jais2": Case("Jais2ForCausalLM", "Jais2Config", {"head_dim": 24}),
    "cwm": Case("CwmForCausalLM", "CwmConfig", {"head_dim": 24, "sliding_window": 40, "bos_token_id": 1}),
    "vaultgemma": Case("VaultGemmaForCausalLM", "VaultGemmaConfig", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 40}),
    "starcoder2": Case("Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": 40}),
    "stablelm": Case("StableLmForCausalLM", "StableLmConfig", {"use_qkv_bias": True}),
    "stablelm_parallel": Case("StableLmForCausalLM", "StableLmConfig", {"use_parallel_residual": True}),
    "gpt_neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "gpt_neox_serial": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", {"use_parallel_residual": False, "attention_bias": False}),
    "minicpm3": Case(
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        {**LATENT, "scale_depth": 1.0, "dim_model_base": 32, "rope_parameters": {**SHORT, "original_max_position_embeddings": 512}},
    ),
    "deepseek_v2": Case(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **LATENT, **FINE, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2_greedy": Case("DeepseekV2ForCausalLM", "DeepseekV2Config", {**LATENT, **FINE, "rope_parameters": MSCALE}),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **LATENT, **FINE, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek_v32": Case("DeepseekV32ForCausalLM", "DeepseekV32Config", {**LATENT, **FINE, **INDEX, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": Case(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**LATENT, **FINE, **INDEX, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "axk1": Case("AXK1ForCausalLM", "AXK1Config", {**LATENT, **FINE, "n_group": 4, "topk_group": 2, "rope_parameters": MSCALE}),
    "axk2": Case("AXK2ForCausalLM", "AXK2Config", {**LATENT, **FINE, **INDEX, "gated_norm_rank": 6, "rope_parameters": MSCALE}),
    "axk2_grouped": Case("AXK2ForCausalLM", "AXK2Config", {**LATENT, **FINE, **INDEX, "n_group": 4, "topk_group": 2}),
    "hy_v4": Case(
        "HYV4ForCausalLM",
        "HYV4Config",
        {
            **LATENT, **FINE, **INDEX, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "hc_mult": 3,
            "hc_magnitude": 1.5,
        },
    ),
    "glm4_moe_lite": Case("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**LATENT, **FINE}),
    "mistral4": Case("Mistral4ForCausalLM", "Mistral4Config", {**LATENT, **FINE, "n_group": 2, "rope_parameters": MINISTRAL}),
    "longcat": Case(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            **LATENT, "num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3,
            "expert_ffn_hidden_size": 24,
        },
    ),
    "youtu": Case("YoutuForCausalLM", "YoutuConfig", {**LATENT, "rope_interleave": False}),
    "olmo2_one_key": Case("Olmo2ForCausalLM", "Olmo2Config", {"num_key_value_heads": 1, "attention_bias": True}),
}


def config_of(case: Case) -> transformers.PreTrainedConfig:
    """The configuration of a case."""
    base = GPT2 if case.config == "GPT2Config" else BASE
    settings = deepcopy({**base, **case.changes})  # transformers writes into what it is given
    if case.architecture.endswith("ForConditionalGeneration"):
        settings = {"text_config": settings, "vision_config": dict(TOWER)}
    return getattr(transformers, case.config)(**settings)


def make_model(case_name: str) -> torch.nn.Module:
    """The transformers model of a case, seeded, with norms and biases that are no constants.

    The last norm's weights have both signs, or a model with tied embeddings would repeat its last token for ever.
    """
    case = CASES[case_name]
    torch.manual_seed(3)
    model = getattr(transformers, case.architecture)(config_of(case)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        biases = [named for named in model.named_buffers() if named[0].endswith(("correction_bias", "layer_scalar"))]
        for name, parameter in (*model.named_parameters(), *biases):
            if parameter.dim() == 1 or name.endswith(("correction_bias", "_proj_bias", "router.gate.weight")):
                spread = 2.0 if name in ("model.norm.weight", "transformer.ln_f.weight", "gpt_neox.final_layer_norm.weight") else 0.3
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
            if name.endswith("q_norm.weight") and case.config in UNSCALED:
                parameter.mul_(0.25)
            if name.endswith("experts.gate_up_proj") and case.config in LIMITED:
                parameter.mul_(4)
    return model


def save_case(path: Path, name: str) -> torch.nn.Module:
    """The model of a case, also saved as a checkpoint into folder `path`."""
    model = make_model(name)
    (CASES[name].save or type(model).save_pretrained)(model, path)
    return model
