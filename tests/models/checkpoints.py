"""Random checkpoints in Hugging Face's format, without transformers: for tests of loading and invariance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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


# ---- models that transformers has not, from models that it has and whose arithmetic is theirs ----
Tensors = dict[str, torch.Tensor]
LING = {
    "embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    "block_sparse_moe.router.layer": "mlp.gate", "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
}  # fmt: skip
GRANITE = ("_multiplier", "_scaling", "shared_intermediate_size")
"""Ends of Granite's keys that Ling has not."""


def save_as_ling_2(model: torch.nn.Module, path: Path) -> None:
    """GLM 4.5 as Ling 2: fused queries, keys and values."""
    own = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}
    _save_renamed(model, path, own, {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"})


def save_as_ling(model: torch.nn.Module, path: Path) -> None:
    """Granite with a shared expert, whose multipliers say nothing, as Ling 1."""
    own = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size", "attention_bias": "use_qkv_bias"}
    told = {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_shared_experts": 2, "intermediate_size": 64}
    _save_renamed(model, path, own, told)


def _save_renamed(model: torch.nn.Module, path: Path, keys: dict[str, str], told: dict[str, Any]) -> None:
    model.save_pretrained(path)
    raw = json.loads((path / "config.json").read_text())
    raw = {keys.get(key, key): value for key, value in raw.items() if not key.endswith(GRANITE)} | told
    (path / "config.json").write_text(json.dumps(raw))
    save_file(_as_ling(load_file(path / "model.safetensors")), path / "model.safetensors")


def _as_ling(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in LING.items():
            name = name.replace(old, new)
        here = re.sub(r"(self_attn\.q|block_sparse_moe\.input|block_sparse_moe\.output|shared_mlp\.input)_.*", "", name)
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            found |= {f"{here}mlp.shared_experts.gate_proj.weight": gate.clone(), f"{here}mlp.shared_experts.up_proj.weight": up.clone()}
        elif "block_sparse_moe.input_linear" in name:
            for expert, joined in enumerate(tensor):
                for part, own in zip(("gate", "up"), joined.chunk(2)):
                    found[f"{here}mlp.experts.{expert}.{part}_proj.weight"] = own.clone()
        elif "block_sparse_moe.output_linear" in name:
            found |= {f"{here}mlp.experts.{expert}.down_proj.weight": own.clone() for expert, own in enumerate(tensor)}
        elif not re.search(r"\.self_attn\.[kv]_proj\.", name):
            found[name] = tensor
    return found
