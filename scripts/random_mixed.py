"""Checkpoints of random weights whose layers are of more than one kind, or that transformers computes: `write_mixed(MIXED[name],
folder)`.

Owns the configurations; which tensors a model has, transformers says. What random_model.py says of files, seeds and speed
holds here.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from random_model import Members, Tensors, tokenizer_config, write_files

ATTENDING = (2, 5, 8, 10, 12, 14)
"""The layers of LFM2-350M that attend."""
MIXED: dict[str, Members] = {
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True,
        "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 32768, "num_attention_heads": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "vocab_size": 248320,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    },
    "lfm2-350m": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_ff_dim": 6656,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
        "hidden_size": 1024, "layer_types": ["full_attention" if layer in ATTENDING else "conv" for layer in range(16)],
        "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 65536,
    },
    "granite-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
        "attention_multiplier": 0.015625, "dtype": "bfloat16", "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 768,
        "intermediate_size": 2048, "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "logits_scaling": 3, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
        "max_position_embeddings": 32768, "num_attention_heads": 12, "num_experts_per_tok": 0, "num_hidden_layers": 32,
        "num_key_value_heads": 4, "num_local_experts": 0, "position_embedding_type": "nope", "residual_multiplier": 0.246,
        "rms_norm_eps": 1e-05, "shared_intermediate_size": 2048, "tie_word_embeddings": True, "vocab_size": 100352,
    },
    "gpt-oss-small": {  # of gpt-oss-20b's kind: a third of its width, layers and vocabulary
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "dtype": "bfloat16",
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 1024, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-05, "sliding_window": 128, "tie_word_embeddings": False, "vocab_size": 65536,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(8)],
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "gemma4-e2b": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": False,
        "dtype": "bfloat16", "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ["sliding_attention" if (layer + 1) % 5 else "full_attention" for layer in range(35)],
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06, "sliding_window": 512, "tie_word_embeddings": True,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": True,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "qwen3-moe-tiny": {  # of no model's size
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "head_dim": 32, "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
        "max_position_embeddings": 2048, "mlp_only_layers": [], "moe_intermediate_size": 128, "norm_topk_prob": True,
        "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False, "vocab_size": 3200,
    },
}  # fmt: skip
"""config.json by the names of known models."""
HOSTED: dict[str, Members] = {
    "opt-125m": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "do_layer_norm_before": True,
        "dtype": "bfloat16", "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768,
    },
    "gpt-neo-125m": {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "attention_types": [[["global", "local"], 6]],
        "dtype": "bfloat16", "hidden_size": 768, "max_position_embeddings": 2048, "num_heads": 12, "num_layers": 12,
        "vocab_size": 50257, "window_size": 256,
    },
    "codegen-350m": {
        "architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "dtype": "bfloat16", "n_ctx": 2048, "n_embd": 1024,
        "n_head": 16, "n_layer": 20, "n_positions": 2048, "rotary_dim": 32, "tie_word_embeddings": False, "vocab_size": 51200,
    },
    "bloom-560m": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "dtype": "bfloat16", "hidden_size": 1024, "n_head": 16,
        "n_layer": 24, "vocab_size": 250880,
    },
}  # fmt: skip
"""The same, of architectures that no file of vnext's knows."""
CONTEXT = 2048
"""Of models that name none."""


def tensor_shapes(config: Members) -> Tensors:
    """Return the shape of every tensor by its Hugging Face name."""
    known = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(known)
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def write_mixed(config: Members, folder: Path, seed: int = 0) -> int:
    """Write all files into `folder`, the weights last. Returns the number of parameters."""
    known = {**config, "bos_token_id": None, "eos_token_id": None}
    context = int(str(config.get("max_position_embeddings", CONTEXT)))
    return write_files(folder, known, tokenizer_config(context), tensor_shapes(config), seed)
