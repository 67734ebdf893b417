"""Checkpoints of random weights whose layers are of more than one kind: `write_mixed(MIXED[name], folder)`.

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
}  # fmt: skip
"""config.json by the names of known models."""


def tensor_shapes(config: Members) -> Tensors:
    """Return the shape of every tensor by its Hugging Face name."""
    known = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(known)
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def write_mixed(config: Members, folder: Path, seed: int = 0) -> int:
    """Write all files into `folder`, the weights last. Returns the number of parameters."""
    known = {**config, "bos_token_id": None, "eos_token_id": None}
    return write_files(folder, known, tokenizer_config(int(str(config["max_position_embeddings"]))), tensor_shapes(config), seed)
