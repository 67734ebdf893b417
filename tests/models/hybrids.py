"""Models with recurrent layers for tests: small random checkpoints of transformers, and a loaded model with pages for its states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from family_cases import BASE as DENSE
from model_helpers import Chunk, Model, load_model, make_batch

from vnext.models.layers.batch import RecurrentBatch
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.recurrent import make_state_pools
from vnext.models.layers.sharding import Parallel

PAGES = 12
BASE = {**DENSE, "num_hidden_layers": 4}
MIXED = ["conv", "full_attention", "conv", "conv"]
QWEN = {
    "head_dim": 16,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 56}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 24}
KINDS_OF_NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": MIXED, "block_multiple_of": 8}),
    "lfm2_bias": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"full_attn_idxs": [2, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN),
    "qwen3_5_wide": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**QWEN, "head_dim": 32, "linear_num_key_heads": 4, "tie_word_embeddings": True, "full_attention_interval": 2},
    ),
    "qwen3_5_images": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", {**QWEN, **AXES}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_5_moe_images": (
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", {**QWEN, **AXES, **EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig",
        {**EXPERTS, "layer_types": MIXED, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "granite_h": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0, "shared_intermediate_size": 120, "position_embedding_type": None, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        },
    ),
    "granite_h_moe": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **MAMBA, "mamba_n_groups": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 56,
            "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **MAMBA, "mamba_n_groups": 2, "mamba_d_ssm": 96, "mlp_multipliers": [0.6, 1.5], "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8],
            "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.5, "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon_h1_norm": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": [KINDS_OF_NEMOTRON[sign] for sign in "M-M*-MM"], "head_dim": 24, "ssm_state_size": 24,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "time_step_min": 1e-6, "tie_word_embeddings": False,
        },
    ),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": [KINDS_OF_NEMOTRON[sign] for sign in "ME*EM-E"], "head_dim": 24, "ssm_state_size": 24,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "time_step_min": 1e-6, "tie_word_embeddings": False,
            "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
            "moe_shared_expert_intermediate_size": 56,
        },
    ),
    "nemotron_h_narrow": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": [KINDS_OF_NEMOTRON[sign] for sign in "MEM*E-E"], "head_dim": 24, "ssm_state_size": 24,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "time_step_min": 1e-6, "tie_word_embeddings": False,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 24,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"num_key_value_heads": 1, "attention_window_size": 40, "w_init_variance_scale": 0.1, "tie_word_embeddings": False},
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5, "num_experts_per_tok": 2, "mamba_d_state": 12,
            "mamba_dt_rank": 6,
        },
    ),
    "jamba_dense": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 12, "time_step_rank": 6, "intermediate_size": 96}),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {"conv_kernel": 3, "use_conv_bias": False, "intermediate_size": 128, "tie_word_embeddings": False},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "time_step_min": 1e-6, "tie_word_embeddings": False},
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "num_local_experts": 5,
            "head_dim": 24, "block_size": 32, "full_attn_alpha_factor": 2.5, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 2.2,
            "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.9, "mlp_beta_factor": 0.6,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "num_key_value_heads": 4,
            "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "linear_head_dim": 24, "linear_num_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "n_shared_experts": 1,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "linear_key_head_dim": 24,
            "linear_value_head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "ling_3": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "num_key_value_heads": 4,
            "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 24, "v_head_dim": 16, "head_dim": 24,
            "num_local_experts": 8, "n_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "num_mtp_layers": 0, "routed_scaling_factor": 1.0, "topk_group": 2,
        },
    ),
    "lfm3": (
        "Lfm3ForCausalLM",
        "Lfm3Config",
        {
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "head_dim": 24, "sliding_window": 40,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2, "num_key_value_heads": 4,
            "use_shared_attention_adapter": True, "use_mem_rope": True, "adapter_rank": 12, "n_mamba_heads": 8, "mamba_ngroups": 2,
            "mamba_d_state": 24, "time_step_min": 1e-6, "initializer_range": 0.1,
        },
    ),
    "zamba2_plain": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "layers_block_type": ["hybrid", "linear_attention", "linear_attention", "hybrid"], "adapter_rank": 12, "mamba_d_state": 24,
            "time_step_min": 1e-6,
        },
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**MAMBA, "attn_layer_indices": [1, 3], "mamba_n_groups": 2, "mamba_conv_bias": False}),
}  # fmt: skip
"""Architecture, configuration and what it has beside BASE."""


def hybrid_config(name: str) -> transformers.PretrainedConfig:
    """That of a case."""
    _, config, changes = CASES[name]
    whole = {**BASE, **changes}
    if config in ("Qwen3_5Config", "Qwen3_5MoeConfig"):
        whole = {"text_config": whole, "vision_config": IMAGES}
    return getattr(transformers, config)(**whole)


def save_hybrid(path: Path, name: str) -> torch.nn.Module:
    """The seeded model of a case, with norms and biases that are no constants, also saved into folder `path`."""
    torch.manual_seed(3)
    model = getattr(transformers, CASES[name][0])(hybrid_config(name)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.dim() == 1 and "inv_freq" not in each:
                spread = 2.0 if each.endswith(("l.norm.weight", "embedding_norm.weight", "final_norm.weight")) else 0.3
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(path)
    return model


def load_oracle(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The saved model again, in this dtype."""
    architecture, *_ = CASES[path.name]
    return getattr(transformers, architecture).from_pretrained(path, dtype=dtype).eval()


class Row(NamedTuple):
    """A chunk of a request and the page of its state."""

    chunk: Chunk
    page: int


class Hybrid(NamedTuple):
    """A loaded model with its pools."""

    model: Model
    pools: Sequence[tuple[torch.Tensor, ...]]

    def logits(self, *rows: Row) -> torch.Tensor:
        """Logits [T, V] of every token of one step; a row whose chunk begins a request starts from zeros."""
        model = self.model
        batch = make_batch([row.chunk for row in rows], 16, len(kv_groups(model.config).windows))
        pages = torch.tensor([row.page for row in rows], dtype=torch.int32)
        fresh = torch.tensor([row.chunk.computed == 0 for row in rows])
        batch = batch._replace(recurrent=RecurrentBatch(self.pools, pages, fresh))
        hidden, _ = model.family.forward(model.params, model.kv, batch, model.config, model.parallel)
        return model.family.logits(model.params, hidden, model.config, model.parallel)


def load_hybrid(path: Path, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> Hybrid:
    """The checkpoint in `path` on the CPU; pools hold what no request left there."""
    model = load_model(path, parallel=parallel, dtype=dtype)
    pools = make_state_pools(model.config, PAGES, dtype, model.parallel.world_size)
    for part in (part for parts in pools for part in parts):
        part.fill_(float("nan"))
    return Hybrid(model, pools)
