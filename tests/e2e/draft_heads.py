"""A target with an EAGLE-3 head or a layer for multi-token prediction, made so that it is mostly right; and what any such layer
drafts, in plain torch.

The target's next token follows nearly from its last one: layers add little to the embedding, and the output head has the rows of
the embedding in another order. The head's attention sees mostly the token itself, for its queries and keys are constant and turn
with the position; what it reads of the target's states is its noise. It knows most of the tokens.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file, save_file
from test_draft_model import counters
from test_speculation import wishes
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from vnext import LLM, SamplingParams
from vnext.runtime.batch.draft_batch import DraftedRow, Run
from vnext.runtime.batch.head_batch import HeadDrafts
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.rank import draft_head

VOCAB, KNOWN, HIDDEN, LAYERS, HEADS, HEAD_DIM, WIDE = 3072, 2700, 64, 8, 4, 16, 96
EPS, THETA = 1e-5, 10000.0
PEAK = 24.0
"""Of the constant queries and keys: one key counts most."""
GAP_MIN, ERROR_MAX = 1e-3, 1e-4
Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rms_norm_eps": EPS, "tie_word_embeddings": False,
    "torch_dtype": "float32", "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "ahead": {"digest_interval": 1, "check_laws": True}, "in step": {"async_scheduling": False, "block_size": 4},
    "preempted": {"num_blocks_override": 40}, "in pieces": {"max_num_batched_tokens": 40},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
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
    config = CONFIG | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": layers} | changes
    for layer in range(layers):
        here = f"model.mtp_layers.{layer}."
        tensors |= layer_tensors(generator, here, HIDDEN, 2 * HEAD_DIM, 0.3)
        tensors[here + "input_proj.weight"] = torch.cat((matrix(generator, HIDDEN, HIDDEN, 0.3), torch.eye(HIDDEN)), dim=1)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{here}{name}.weight"] = 1 + torch.randn(HIDDEN, generator=generator) * 0.1
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name]), generator=generator) * 0.1
    save(folder, config, tensors)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
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


class PlainLayer(ABC):
    """What a layer drafts for greedy requests: from all tokens at once, without a cache, in plain torch and transformers."""

    def __init__(self, target: PreTrainedModel, tensors: Tensors, here: str, known: torch.Tensor) -> None:
        """`here`: where its tensors lie. `known`: the tokens that it knows."""
        self.target, self.tensors, self.here, self.known = target, tensors, here, known
        self.embedding = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)

    @abstractmethod
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the layer reads of the target's tokens int64 [n], [n, hidden]."""

    @abstractmethod
    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits behind the last of the tokens int64 [n], its state), by the states before them [n, hidden]."""

    @torch.inference_mode()
    def drafts(self, tokens: list[int], most: int) -> tuple[list[int], torch.Tensor, float]:
        """The drafts behind `tokens`, of which the target has computed all but the last; their logits [most, known]; and the
        smallest distance of a draft's logit to the next one's."""
        states = self.states(torch.tensor(tokens[:-1]))
        found, all_logits, gap = list(tokens), [], float("inf")
        for _ in range(most):
            logits, state = self.step(torch.tensor(found[1:]), states)
            all_logits.append(logits)
            best = logits.topk(2).values
            gap = min(gap, float(best[0] - best[1]))
            draft = int(logits.argmax())
            found.append(int(self.known[draft]))
            states = torch.cat((states, state[None]))
        return found[len(tokens) :], torch.stack(all_logits), gap

    def layer(self, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream of the last token behind the layer."""
        residual = residual + self.attention(inputs)
        x = self.norm(residual, self.here + "post_attention_layernorm")
        gate, up = self.product(x, "mlp.gate_proj"), self.product(x, "mlp.up_proj")
        return (residual + self.product(torch.nn.functional.silu(gate) * up, "mlp.down_proj"))[-1]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.product(x, f"self_attn.{name}_proj").view(len(x), -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
        key, value = (each.repeat_interleave(HEADS // len(each), dim=0) for each in (key, value))
        seen = torch.nn.functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        return self.product(seen.transpose(0, 1).reshape(len(x), HIDDEN), "self_attn.o_proj")

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.tensors[f"{self.here}{name}.weight"], self.tensors.get(f"{self.here}{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), self.tensors[name + ".weight"], EPS)


class PlainHead(PlainLayer):
    """An EAGLE-3 head."""

    def __init__(self, target: Path, head: Path, layers: tuple[int, ...]) -> None:
        tensors = load_file(head / "model.safetensors")
        here = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        super().__init__(model, tensors, here, torch.arange(KNOWN) + tensors["d2t"])
        self.layers, self.norms_before = layers, json.loads((head / "config.json").read_text())["norm_before_residual"]

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.target(tokens[None], output_hidden_states=True).hidden_states
        return torch.cat([hidden[layer][0] for layer in self.layers], dim=1) @ self.tensors["fc.weight"].T

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(states, self.here + "hidden_norm")
        joined = torch.cat((self.norm(self.embedding[tokens], self.here + "input_layernorm"), normed), dim=1)
        state = self.layer(joined, normed if self.norms_before else states)
        return self.norm(state, "norm") @ self.tensors["lm_head.weight"].T, state


class PlainMtp(PlainLayer):
    """The first layer for multi-token prediction of a MiMo."""

    def __init__(self, target: Path) -> None:
        model = Qwen2ForCausalLM.from_pretrained(target, dtype=torch.float32)
        super().__init__(model, load_file(target / "model.safetensors"), "model.mtp_layers.0.", torch.arange(VOCAB))

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda norm, inputs: kept.append(inputs[0][0]))
        self.target(tokens[None])
        hook.remove()
        return kept[0]

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = self.norm(self.embedding[tokens], self.here + "token_layernorm")
        joined = self.product(torch.cat((self.norm(states, self.here + "hidden_layernorm"), embeddings), dim=1), "input_proj")
        state = self.norm(self.layer(self.norm(joined, self.here + "input_layernorm"), joined), self.here + "final_layernorm")
        return state @ self.tensors["lm_head.weight"].T, state


def answers(target: Path, **settings: Any) -> list[tuple[object, ...]]:
    with LLM(str(target), threads=1, seed=1, **settings) as llm:
        found = [each.outputs[0] for each in llm.generate(*wishes(), use_tqdm=False)]
    return [(each.token_ids, each.finish_reason, each.stop_reason, each.logprobs) for each in found]


def repeated(target: Path, **settings: Any) -> None:
    """Answer greedily, in an engine of this process, what shares a beginning, twice."""
    prompts = ["def add(a, b):\n    return a + b\n" * 3 + each for each in ("for", "one two", "def", "x = 1", "The module", "\n", "if", "1")]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with engines_here(), LLM(str(target), threads=1, executor="inproc", log="off", **settings) as llm:
        llm.generate([*prompts, "x"], params, use_tqdm=False)
        llm.generate(prompts, params, use_tqdm=False)


def require_right(log_dir: Path, capsys: pytest.CaptureFixture[str], preempts: bool) -> None:
    """The log holds all laws, and drafts were kept."""
    counts = counters(log_dir, capsys)
    assert counts["draft_tokens"] > 250 and counts["accepted_tokens"] > counts["draft_tokens"] * 0.3
    assert counts["preempted"] > 0 or not preempts


class Seen:
    """What engines of this process draft: (tokens, drafts, the logits of each)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[tuple[list[int], list[int], torch.Tensor]] = []
        self._last = torch.empty(0)
        self._logits: dict[int, list[torch.Tensor]] = {}
        monkeypatch.setattr(HeadDrafts, "drafts", lambda *given, made=HeadDrafts.drafts: self._drafts(made, *given))
        monkeypatch.setattr(HeadDrafts, "_draw", lambda *given, made=HeadDrafts._draw: self._draw(made, *given))
        monkeypatch.setattr(draft_head, "sample", lambda *given, made=draft_head.sample: self._sample(made, *given))

    def _drafts(self, made: Any, batch: HeadDrafts, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        self._logits = {row.place: [] for row in rows}
        found = made(batch, rows)
        for row, each in zip(rows, found):
            if len(each):
                self.all.append((row.tokens.tolist(), each.tolist(), torch.stack(self._logits[row.place])))
        return found

    def _draw(self, made: Any, batch: HeadDrafts, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        found = made(batch, runs, drafts)
        for run, logits in zip(runs, self._last):
            self._logits[run.place].append(logits)
        return found

    def _sample(self, made: Any, logits: torch.Tensor, *given: Any) -> Any:
        self._last = logits
        return made(logits, *given)

    def require(self, plain: PlainLayer) -> None:
        """The drafts are those of plain torch."""
        assert len(self.all) > 60
        for tokens, found, logits in self.all[:: 1 + len(self.all) // 150]:
            expected, plain_logits, gap = plain.drafts(tokens, len(found))
            alike = len(found) if found == expected else 1
            assert gap < GAP_MIN or found == expected
            errors = (logits[:, plain.known] - plain_logits)[:alike].abs()
            assert errors.max() < ERROR_MAX * plain_logits.abs().max()


def turned(x: torch.Tensor) -> torch.Tensor:
    """Heads [heads, n, head_dim] turned by their positions from 0 on."""
    angles = torch.arange(x.shape[1]).float()[:, None] / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)
