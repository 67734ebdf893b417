"""Whole engines with an EAGLE-3 head: the answers are those without drafts, and the drafts those of plain torch, however it runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import LAYERS, VOCAB, PlainHead, random_head, right_head, save_target
from engine_here import engines_here
from safetensors.torch import load_file, save_file
from test_draft_model import counters
from test_speculation import wishes

from vnext import LLM, SamplingParams
from vnext.models.errors import ModelError
from vnext.models.families import llama_eagle3
from vnext.replay.cli.main import main
from vnext.runtime.batch.draft_batch import DraftedRow, Run
from vnext.runtime.batch.head_batch import HeadDrafts
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.settings import SettingsError

WAYS: dict[str, dict[str, Any]] = {
    "ahead": {"digest_interval": 1, "check_laws": True}, "in step": {"async_scheduling": False, "block_size": 4},
    "preempted": {"num_blocks_override": 40}, "in pieces": {"max_num_batched_tokens": 40},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}  # fmt: skip
GAP_MIN, ERROR_MAX = 1e-3, 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return right_head(tmp_path_factory.mktemp("models") / "head", target)


def asked(head: Path, drafts: int = 4, **changes: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts, "row_cost": 0} | changes


def answers(target: Path, **settings: Any) -> list[tuple[object, ...]]:
    with LLM(str(target), threads=1, seed=1, **settings) as llm:
        found = [each.outputs[0] for each in llm.generate(*wishes(), use_tqdm=False)]
    return [(each.token_ids, each.finish_reason, each.stop_reason, each.logprobs) for each in found]


@pytest.fixture(scope="module")
def undrafted(target: Path) -> list[tuple[object, ...]]:
    return answers(target, log="off")


@pytest.mark.parametrize("way", WAYS)
def test_a_head_changes_no_answer(
    way: str, target: Path, head: Path, undrafted: list[tuple[object, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"log": "full", "log_dir": str(tmp_path), **WAYS[way]}
    assert answers(target, speculative_config=asked(head), **settings) == undrafted
    counts = counters(tmp_path, capsys)
    assert counts["draft_tokens"] > 250 and counts["accepted_tokens"] > counts["draft_tokens"] * 0.3
    assert counts["preempted"] > 0 or way != "preempted"


def test_ranks_draft_the_same(target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that drafted otherwise would compute other tokens: words of the inputs are compared at every step."""
    plain = answers(target, log="off", tensor_parallel_size=2)
    settings = {"log": "full", "log_dir": str(tmp_path), "tensor_parallel_size": 2, "digest_interval": 1, "num_blocks_override": 40}
    assert answers(target, speculative_config=asked(head), **settings) == plain
    counts = counters(tmp_path, capsys)
    assert counts["accepted_tokens"] > counts["draft_tokens"] * 0.3 and counts["preempted"] > 0
    (log,) = tmp_path.iterdir()
    assert main(["exec", str(log), "--threads", "1"]) == 0 and "every token is the same" in capsys.readouterr().out


class Seen:
    """What engines of this process draft: (tokens, drafts, logits of the first draft)."""

    def __init__(self) -> None:
        self.all: list[tuple[list[int], list[int], torch.Tensor]] = []
        self._last, self._first = torch.empty(0), {}

    def drafts(self, made: Any, batch: HeadDrafts, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        found = made(batch, rows)
        for row, each in zip(rows, found):
            if len(each):
                self.all.append((row.tokens.tolist(), each.tolist(), self._first[row.place]))
        return found

    def draw(self, made: Any, batch: HeadDrafts, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        found = made(batch, runs, drafts)
        if drafts is None:
            self._first = {run.place: logits for run, logits in zip(runs, self._last)}
        return found

    def logits(self, made: Any, *given: Any) -> torch.Tensor:
        self._last = made(*given)
        return self._last


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["right", "random"])
def test_drafts_are_those_of_plain_torch(
    kind: str, way: str, target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow from the tokens alone: whatever was hit, preempted, cut in pieces or drafted wrongly before."""
    seen = Seen()
    monkeypatch.setattr(HeadDrafts, "drafts", lambda *given, made=HeadDrafts.drafts: seen.drafts(made, *given))
    monkeypatch.setattr(HeadDrafts, "_draw", lambda *given, made=HeadDrafts._draw: seen.draw(made, *given))
    monkeypatch.setattr(llama_eagle3, "logits", lambda *given, made=llama_eagle3.logits: seen.logits(made, *given))
    if kind == "random":
        head = random_head(tmp_path / "head")
    prompts = ["def add(a, b):\n    return a + b\n" * 3 + each for each in ("for", "one two", "def", "x = 1", "The module", "\n", "if", "1")]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with engines_here(), LLM(str(target), threads=1, executor="inproc", log="off", speculative_config=asked(head, 3), **WAYS[way]) as llm:
        llm.generate([*prompts, "x"], params, use_tqdm=False)
        llm.generate(prompts, params, use_tqdm=False)
    plain = PlainHead(target, head, (2, LAYERS // 2, LAYERS - 3) if kind == "right" else (0, 3, 5))
    assert len(seen.all) > 60
    for tokens, found, logits in seen.all[:: 1 + len(seen.all) // 150]:
        expected, first, gap = plain.drafts(tokens, len(found))
        assert (logits[plain.known] - first).abs().max() < ERROR_MAX * first.abs().max()
        assert gap < GAP_MIN or found == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 512}, "vocabulary of 512 tokens, and the model has 3072"),
        ({"target_hidden_size": 96}, "hidden states of width 96, and the model's have 64: name a head that was trained"),
        ({"hidden_size": 96, "target_hidden_size": 64}, "fc.weight"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, "inputs of layers 1, 4, 8 of a model of 8 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, "inputs of layers 2, 5, 8 of a model of 8 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 3, 4]}, "a list of different layers"),
        ({"eagle_config": [2]}, "eagle_config must be an object"),
        ({"num_hidden_layers": 2}, "EAGLE-3 heads of 2 layers"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 512}, "asks for .512, 64."),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ],
)
def test_a_head_that_cannot_draft_is_refused(
    changes: dict[str, Any], sentence: str, target: Path, head: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(head, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with engines_here(), pytest.raises((StartFailed, ModelError, SettingsError), match=sentence):
        LLM(str(target), threads=1, executor="inproc", log="off", speculative_config=asked(folder))


def test_what_is_no_head_is_refused(target: Path, head: Path) -> None:
    for model, config, sentence in (
        (target, asked(target), "no EAGLE-3 head, its config.json names LlamaForCausalLM"),
        (target, asked(head, method="draft_model"), "a head that drafts for a model"),
        (target, asked(head, model=""), "no model is given"),
        (head, {"method": "ngram"}, "a head that drafts for a model"),
    ):
        with engines_here(), pytest.raises((StartFailed, ModelError, SettingsError), match=sentence):
            LLM(str(model), threads=1, executor="inproc", log="off", speculative_config=config)


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [(None, "2700 whole numbers as 'd2t' .no such tensor"), (torch.zeros(9, dtype=torch.int64), "shape .9."), (1, "beyond the vocabulary")],
)
def test_numbers_of_tokens_that_cannot_be_are_refused(numbers: Any, sentence: str, target: Path, head: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(head, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + VOCAB if isinstance(numbers, int) else numbers
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    with engines_here(), pytest.raises(StartFailed, match=sentence):
        LLM(str(target), threads=1, executor="inproc", log="off", speculative_config=asked(folder))


def test_a_head_without_an_embedding_has_the_models_width(target: Path, tmp_path: Path) -> None:
    """One of another width, and with an embedding, drafts."""
    wide = random_head(tmp_path / "wide", hidden=96)
    with engines_here(), LLM(str(target), threads=1, executor="inproc", log="off", speculative_config=asked(wide)) as llm:
        assert len(llm.generate("one two", SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 9
    tensors = load_file(wide / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, wide / "model.safetensors")
    with engines_here(), pytest.raises(StartFailed, match="no embedding and the width 96, and the model's embedding has 64"):
        LLM(str(target), threads=1, executor="inproc", log="off", speculative_config=asked(wide))
