"""Small random models of architectures that transformers computes: the configurations on which it is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_cases import BASE
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from vnext.models.registry import IMPLEMENTATION

HEADS = {"head_dim": 16}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CASES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"num_attention_heads": 6, "hidden_size": 96},
    "codegen": {"rotary_dim": 8, "n_ctx": 512},
    "cohere": {},
    "cohere2": {"sliding_window": 40},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "sliding_window": 40, **HEADS},
    "ernie4_5": {},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "attn_config": {"clip_qkv": 2.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "doge": {"keep_window_size": 384},
    "dots1": {**GROUPED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    "falcon 7b": {"multi_query": True},
    "falcon of heads": {"multi_query": False, "parallel_attn": False},
    "falcon rw": {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True, "num_attention_heads": 6, "hidden_size": 96},
    "exaone4": {"sliding_window": 40, "sliding_window_pattern": 2},
    "gemma": HEADS,
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": {**GROUPED, **HEADS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 40},
    "gpt_neox": {},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gptj": {"rotary_dim": 8},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "granitemoe": {"num_local_experts": 6, "attention_multiplier": 0.2},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "jais2": {},
    "jetmoe": {"num_local_experts": 6, "kv_channels": 16},
    "kolibri1": {
        **HEADS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
        "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": HEADS,
    "mpt": {"max_seq_len": 512, "attn_config": {"clip_qkv": 4.0}},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {"sliding_window": 40},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 120, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48},
    "seed_oss": HEADS,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "xglm": {"ffn_dim": 120, "num_layers": 3, "attention_heads": 4, "d_model": 64},
    "vaultgemma": {"sliding_window": 40, "query_pre_attn_scalar": 16, **HEADS},
}  # fmt: skip
"""model_type, and which form of it -> what its configuration has beside BASE."""


def save_hosted(path: Path, name: str, forced: bool = True, **changes: object) -> torch.nn.Module:
    """The transformers model of a case, seeded, with norms and biases that are no constants, also saved into folder `path`.
    `forced`: as --model-impl transformers does."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name.partition(" ")[0]](**{**BASE, **CASES.get(name, {}), **changes})).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(path)
    if forced:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {IMPLEMENTATION: "transformers"}))
    return model
