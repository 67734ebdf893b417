"""A target and an EAGLE-3 head for it, made so that the head is mostly right; and what any such head drafts, in plain torch.

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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vnext.runtime.processes.launch import DEMO_MODEL

VOCAB, KNOWN, HIDDEN, LAYERS, HEADS, HEAD_DIM, WIDE = 3072, 2700, 64, 8, 4, 16, 96
EPS, THETA = 1e-5, 10000.0
PEAK = 24.0
"""Of the constant queries and keys: one key counts most."""
Tensors = dict[str, torch.Tensor]


def matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_target(folder: Path, **changes: Any) -> Path:
    """A Llama with the demo model's tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
        "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rms_norm_eps": EPS, "tie_word_embeddings": False,
        "torch_dtype": "float32", "eos_token_id": 0, "bos_token_id": None,
    } | changes  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    after = torch.randperm(VOCAB, generator=generator)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding[after] * 0.5, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= layer_tensors(generator, f"model.layers.{layer}.", HIDDEN, 2 * HEAD_DIM, 0.3)
    save(folder, config, tensors)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


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


def random_head(folder: Path, *, hidden: int = HIDDEN) -> Path:
    """A head without biases whose attention sees all tokens, with an embedding of its own, in the names of vLLM's speculators."""
    generator = torch.Generator().manual_seed(6)
    inner = head_config(attention_bias=False, hidden_size=hidden)
    for name in ("architectures", "draft_vocab_size", "norm_before_residual"):
        del inner[name]
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": KNOWN,
        "transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": [5, 0, 3], "norm_before_residual": False,
        "target_hidden_size": HIDDEN,
    }  # fmt: skip
    tensors = layer_tensors(generator, "midlayer.", 2 * hidden, HIDDEN, 1.0, hidden)
    tensors |= ends(generator, matrix(generator, VOCAB, hidden, 8.0), 1.0) | {"embed_tokens.weight": matrix(generator, VOCAB, hidden, 8.0)}
    return save(folder, outer, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()})


def ends(generator: torch.Generator, head: torch.Tensor, state: float) -> Tensors:
    """All but the layer: the head knows some rows of `head`, and its states have this weight."""
    known, hidden = torch.randperm(VOCAB, generator=generator)[:KNOWN].sort().values, head.shape[1]
    return {
        "fc.weight": matrix(generator, hidden, 3 * HIDDEN), "midlayer.hidden_norm.weight": torch.full((hidden,), state),
        "norm.weight": torch.ones(hidden), "lm_head.weight": head[known], "d2t": known - torch.arange(KNOWN),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, known, True),
    }  # fmt: skip


class PlainHead:
    """What a head drafts for greedy requests: from all tokens at once, without a cache, in plain torch and transformers."""

    def __init__(self, target: Path, head: Path, layers: tuple[int, ...]) -> None:
        self.layers, self.tensors = layers, load_file(head / "model.safetensors")
        raw = json.loads((head / "config.json").read_text())
        self.norms_before = raw["norm_before_residual"]
        self.known = torch.arange(KNOWN) + self.tensors["d2t"]
        self.here = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.embedding = self.tensors.get("embed_tokens.weight", self.target.get_input_embeddings().weight)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> tuple[list[int], torch.Tensor, float]:
        """The drafts behind `tokens`, of which the target has computed all but the last; the logits of the first; and the
        smallest distance of a draft's logit to the next one's."""
        hidden = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in self.layers], dim=1) @ self.tensors["fc.weight"].T
        found, first, gap = list(tokens), [], float("inf")
        for _ in range(most):
            logits, state = self.step(torch.tensor(found[1:]), states)
            first.append(logits)
            best = logits.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            draft = int(logits.argmax())
            found.append(int(self.known[draft]))
            states = torch.cat((states, state[None]))
        return found[len(tokens) :], first[0], gap

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits behind the last of the tokens int64 [n], its state), by the states before them [n, hidden]."""
        normed = self.norm(states, self.here + "hidden_norm")
        joined = torch.cat((self.norm(self.embedding[tokens], self.here + "input_layernorm"), normed), dim=1)
        residual = (normed if self.norms_before else states) + self.attention(joined)
        x = self.norm(residual, self.here + "post_attention_layernorm")
        gate, up = self.product(x, "mlp.gate_proj"), self.product(x, "mlp.up_proj")
        state = (residual + self.product(torch.nn.functional.silu(gate) * up, "mlp.down_proj"))[-1]
        return self.norm(state, "norm") @ self.tensors["lm_head.weight"].T, state

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.product(x, f"self_attn.{name}_proj").view(len(x), HEADS, HEAD_DIM).transpose(0, 1) for name in "qkv")
        seen = torch.nn.functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        return self.product(seen.transpose(0, 1).reshape(len(x), HIDDEN), "self_attn.o_proj")

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.tensors[f"{self.here}{name}.weight"], self.tensors.get(f"{self.here}{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), self.tensors[name + ".weight"], EPS)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Heads [heads, n, head_dim] turned by their positions from 0 on."""
    angles = torch.arange(x.shape[1]).float()[:, None] / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)
