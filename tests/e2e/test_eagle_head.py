"""Whole engines with an EAGLE-3 head: the answers are those without drafts, and the drafts those of plain torch, however it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import WAYS, PlainHead, Seen, answers, repeated, require_right
from engine_here import engines_here
from heads.saved import LAYERS, VOCAB, random_head, right_head, save_target
from safetensors.torch import load_file, save_file

from vnext import LLM, SamplingParams
from vnext.models.errors import ModelError
from vnext.replay.cli.main import main
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.settings import SettingsError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return right_head(tmp_path_factory.mktemp("models") / "head", target)


def asked(head: Path, drafts: int = 4, **changes: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts, "row_cost": 0} | changes


@pytest.fixture(scope="module")
def undrafted(target: Path) -> list[tuple[object, ...]]:
    return answers(target, log="off")


@pytest.mark.parametrize("way", WAYS)
def test_a_head_changes_no_answer(
    way: str, target: Path, head: Path, undrafted: list[tuple[object, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"log": "full", "log_dir": str(tmp_path), **WAYS[way]}
    assert answers(target, speculative_config=asked(head), **settings) == undrafted
    require_right(tmp_path, capsys, preempts=way == "preempted")


def test_ranks_draft_the_same(target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that drafted otherwise would compute other tokens: words of the inputs are compared at every step."""
    plain = answers(target, log="off", tensor_parallel_size=2)
    settings = {"log": "full", "log_dir": str(tmp_path), "tensor_parallel_size": 2, "digest_interval": 1, "num_blocks_override": 40}
    assert answers(target, speculative_config=asked(head), **settings) == plain
    require_right(tmp_path, capsys, preempts=True)
    (log,) = tmp_path.iterdir()
    assert main(["exec", str(log), "--threads", "1"]) == 0 and "every token is the same" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["right", "random"])
def test_drafts_are_those_of_plain_torch(
    kind: str, way: str, target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow from the tokens alone: whatever was hit, preempted, cut in pieces or drafted wrongly before."""
    seen = Seen(monkeypatch)
    if kind == "random":
        head = random_head(tmp_path / "head")
    repeated(target, speculative_config=asked(head, 3), **WAYS[way])
    seen.require(PlainHead(target, head, (2, LAYERS // 2, LAYERS - 3) if kind == "right" else (0, 3, 5)))


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
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised weights"),
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
