"""Random checkpoints in Hugging Face's format, without transformers: for tests of loading and invariance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a config asks for."""
    hidden, wide = raw["hidden_size"], raw["intermediate_size"]
    head_dim = raw.get("head_dim", hidden // raw["num_attention_heads"])
    heads, kv_heads = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
    modules = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    result = {"model.embed_tokens.weight": (raw["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not raw["tie_word_embeddings"]:
        result["lm_head.weight"] = (raw["vocab_size"], hidden)
    for index in range(raw["num_hidden_layers"]):
        for module, shape in modules.items():
            result[f"model.layers.{index}.{module}.weight"] = shape
            if raw.get("attention_bias" if "attn" in module else "mlp_bias") and "proj" in module:
                result[f"model.layers.{index}.{module}.bias"] = shape[:1]
    return result


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that keep activations near one, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + float("norm" in name)
        for name, shape in shapes(raw).items()
    }


def save_checkpoint(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Write a checkpoint with PLAIN's config and some changes into folder `path`."""
    raw = {**PLAIN, **changes}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(raw) if tensors is None else tensors, path / "model.safetensors")
    return path
