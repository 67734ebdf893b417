"""A target with an EAGLE-3 head or a layer for multi-token prediction, made so that it is mostly right.

The target's next token follows nearly from its last one: layers add little to the embedding, and the output head has the rows of
the embedding in another order. The head's attention sees mostly the token itself, for its queries and keys are constant and turn
with the position; what it reads of the target's states is its noise. It knows most of the tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rank_drive import tiny_checkpoint
from safetensors.torch import load_file, save_file

from vnext.runtime.processes.launch import DEMO_MODEL

VOCAB, KNOWN, HIDDEN, LAYERS, HEADS, HEAD_DIM, WIDE = 3072, 2700, 64, 8, 4, 16, 96
EPS, THETA = 1e-5, 10000.0
PEAK = 24.0
"""Of the constant queries and keys: one key counts most."""
Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rms_norm_eps": EPS, "tie_word_embeddings": False,
    "torch_dtype": "float32", "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_target(folder: Path, **changes: Any) -> Path:
    """A Llama with the demo model's tokenizer."""
    save(folder, CONFIG | changes, target_tensors(torch.Generator().manual_seed(3)))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def save_mimo(folder: Path, layers: int = 1, **changes: Any) -> Path:
    """A MiMo with the demo model's tokenizer, whose first layer for multi-token prediction is mostly right; the others are not."""
    generator = torch.Generator().manual_seed(3)
    tensors = target_tensors(generator)
    config = CONFIG | mimo_names(layers) | changes
    tensors |= mtp_tensors(generator, layers)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name]), generator=generator) * 0.1
    save(folder, config, tensors)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def mimo_names(layers: int) -> dict[str, Any]:
    return {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": layers}


def mtp_tensors(generator: torch.Generator, layers: int) -> Tensors:
    """Layers for multi-token prediction, without biases."""
    tensors: Tensors = {}
    for layer in range(layers):
        here = f"model.mtp_layers.{layer}."
        tensors |= layer_tensors(generator, here, HIDDEN, 2 * HEAD_DIM, 0.3)
        tensors[here + "input_proj.weight"] = torch.cat((matrix(generator, HIDDEN, HIDDEN, 0.3), torch.eye(HIDDEN)), dim=1)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{here}{name}.weight"] = 1 + torch.randn(HIDDEN, generator=generator) * 0.1
    return tensors


def tiny_mimo(folder: Path) -> Path:
    """The tiny checkpoint of rank_drive as a MiMo with a layer for multi-token prediction."""
    tiny_checkpoint(folder, architectures=["Qwen2ForCausalLM"])
    config = json.loads((folder / "config.json").read_text()) | mimo_names(1)
    tensors = load_file(folder / "model.safetensors") | mtp_tensors(torch.Generator().manual_seed(3), 1)
    tensors |= {f"model.mtp_layers.0.self_attn.{name}_proj.bias": torch.full((width,), 0.1) for name, width in (("q", 64), ("k", 32), ("v", 32))}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def target_tensors(generator: torch.Generator) -> Tensors:
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    after = torch.randperm(VOCAB, generator=generator)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding[after] * 0.5, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= layer_tensors(generator, f"model.layers.{layer}.", HIDDEN, 2 * HEAD_DIM, 0.3)
    return tensors


def layer_tensors(generator: torch.Generator, here: str, inputs: int, kv_width: int, added: float, hidden: int = HIDDEN) -> Tensors:
    heads = HEADS * HEAD_DIM
    return {
        here + "input_layernorm.weight": torch.ones(hidden), here + "post_attention_layernorm.weight": torch.ones(hidden),
        here + "self_attn.q_proj.weight": matrix(generator, heads, inputs),
        here + "self_attn.k_proj.weight": matrix(generator, kv_width, inputs),
        here + "self_attn.v_proj.weight": matrix(generator, kv_width, inputs),
        here + "self_attn.o_proj.weight": matrix(generator, hidden, heads, added),
        here + "mlp.gate_proj.weight": matrix(generator, WIDE, hidden), here + "mlp.up_proj.weight": matrix(generator, WIDE, hidden),
        here + "mlp.down_proj.weight": matrix(generator, hidden, WIDE, added),
    }  # fmt: skip


def head_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": KNOWN, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM, "rms_norm_eps": EPS, "max_position_embeddings": 2048, "hidden_act": "silu", "torch_dtype": "float32",
        "attention_bias": True, "norm_before_residual": True,
    } | changes  # fmt: skip


def right_head(folder: Path, target: Path) -> Path:
    """A head of three layers of the target by default, mostly right."""
    generator = torch.Generator().manual_seed(4)
    tensors = layer_tensors(generator, "midlayer.", 2 * HIDDEN, HIDDEN, 0.1)
    constant = torch.zeros(HEADS, HEAD_DIM)
    constant[:, :3] = PEAK**0.5  # the pairs that turn fastest
    own = torch.eye(HIDDEN)
    for name in ("q", "k"):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = constant.flatten()
    tensors["midlayer.self_attn.v_proj.weight"] = torch.cat((own, matrix(generator, HIDDEN, HIDDEN, 0.5)), dim=1)
    tensors["midlayer.self_attn.o_proj.weight"] = own
    tensors |= {f"midlayer.self_attn.{name}_proj.bias": torch.zeros(HIDDEN) for name in ("v", "o")}
    return save(folder, head_config(), tensors | ends(generator, load_file(target / "model.safetensors")["lm_head.weight"], 0.6))


def random_head(
    folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB, known: int = KNOWN, layers: tuple[int, ...] = (5, 0, 3)
) -> Path:
    """A head without biases whose attention sees all tokens, with an embedding of its own, in the names of vLLM's speculators."""
    generator = torch.Generator().manual_seed(6)
    inner = head_config(attention_bias=False, hidden_size=hidden, vocab_size=vocab)
    for name in ("architectures", "draft_vocab_size", "norm_before_residual"):
        del inner[name]
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": known,
        "transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": list(layers), "norm_before_residual": False,
        "target_hidden_size": HIDDEN,
    }  # fmt: skip
    tensors = layer_tensors(generator, "midlayer.", 2 * hidden, HIDDEN, 1.0, hidden)
    tensors |= ends(generator, matrix(generator, vocab, hidden, 8.0), 1.0, known, len(layers))
    tensors["embed_tokens.weight"] = matrix(generator, vocab, hidden, 8.0)
    return save(folder, outer, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()})


def ends(generator: torch.Generator, head: torch.Tensor, state: float, count: int = KNOWN, layers: int = 3) -> Tensors:
    """All but the layer: the head knows some rows of `head`, and its states have this weight."""
    (vocab, hidden), width = head.shape, layers * HIDDEN
    known = torch.randperm(vocab, generator=generator)[:count].sort().values
    return {
        "fc.weight": matrix(generator, hidden, width), "midlayer.hidden_norm.weight": torch.full((hidden,), state),
        "norm.weight": torch.ones(hidden), "lm_head.weight": head[known], "d2t": known - torch.arange(count),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True),
    }  # fmt: skip
