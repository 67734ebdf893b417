"""Engines that draft with heads, and what any such layer drafts, in plain torch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from heads.saved import EPS, HEAD_DIM, HEADS, HIDDEN, KNOWN, THETA, VOCAB, Tensors
from safetensors.torch import load_file
from test_draft_model import counters
from test_speculation import wishes
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from vnext import LLM, SamplingParams
from vnext.runtime.batch.draft_batch import DraftedRow, HeadDrafts, Run
from vnext.runtime.rank import draft_head

GAP_MIN, ERROR_MAX = 1e-3, 1e-4
WAYS: dict[str, dict[str, Any]] = {
    "ahead": {"digest_interval": 1, "check_laws": True}, "in step": {"async_scheduling": False, "block_size": 4},
    "preempted": {"num_blocks_override": 40}, "in pieces": {"max_num_batched_tokens": 40},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
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
