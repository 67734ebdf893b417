"""Whole engines whose checkpoint's own layer drafts: the answers are those without drafts, and the drafts those of plain torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from draft_heads import WAYS, PlainMtp, Seen, answers, repeated, require_right
from engine_here import engines_here
from heads.saved import save_mimo, save_target
from safetensors.torch import load_file, save_file

from vnext import LLM
from vnext.models.errors import ModelError
from vnext.replay.cli.main import main
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.settings import SettingsError

MTP = {"method": "mtp", "num_speculative_tokens": 4, "row_cost": 0}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mimo(tmp_path_factory.mktemp("models") / "mimo")


@pytest.fixture(scope="module")
def undrafted(mimo: Path) -> list[tuple[object, ...]]:
    return answers(mimo, log="off")


def changed(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy with another configuration."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_the_layer_changes_no_answer(
    way: str, mimo: Path, undrafted: list[tuple[object, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"log": "full", "log_dir": str(tmp_path), **WAYS[way]}
    assert answers(mimo, speculative_config=MTP, **settings) == undrafted
    require_right(tmp_path, capsys, preempts=way == "preempted")


def test_ranks_draft_the_same(mimo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one layer on each rank, and embedding and head in parts. vLLM's older name of the method names it too."""
    plain = answers(mimo, log="off", tensor_parallel_size=2)
    settings = {"log": "full", "log_dir": str(tmp_path), "tensor_parallel_size": 2, "digest_interval": 1, "num_blocks_override": 40}
    assert answers(mimo, speculative_config=MTP | {"method": "mimo_mtp"}, **settings) == plain
    require_right(tmp_path, capsys, preempts=True)
    (log,) = tmp_path.iterdir()
    assert main(["exec", str(log), "--threads", "1"]) == 0 and "every token is the same" in capsys.readouterr().out


def test_the_layer_of_a_quantised_model_drafts(mimo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounded = {"quantization": "int8", "kv_cache_dtype": "int8"}
    settings = {"log": "full", "log_dir": str(tmp_path), **rounded}
    assert answers(mimo, speculative_config=MTP, **settings) == answers(mimo, log="off", **rounded)
    require_right(tmp_path, capsys, preempts=False)


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_those_of_plain_torch(way: str, mimo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow from the tokens alone: whatever was hit, preempted, cut in pieces or drafted wrongly before."""
    seen = Seen(monkeypatch)
    repeated(mimo, speculative_config=MTP | {"num_speculative_tokens": 3}, **WAYS[way])
    seen.require(PlainMtp(mimo))


def test_the_first_of_several_layers_drafts_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = Seen(monkeypatch), save_mimo(tmp_path / "three", layers=3)
    repeated(model, speculative_config=MTP)
    seen.require(PlainMtp(model))


def test_the_model_is_a_qwen_2_with_more_tensors(mimo: Path, undrafted: list[tuple[object, ...]], tmp_path: Path) -> None:
    assert answers(changed(mimo, tmp_path / "qwen", architectures=["Qwen2ForCausalLM"]), log="off") == undrafted


def test_what_drafts_cost_is_measured(mimo: Path, tmp_path: Path) -> None:
    with LLM(str(mimo), threads=1, log="full", log_dir=str(tmp_path), speculative_config={"method": "mtp"}):
        pass
    (log,) = tmp_path.iterdir()
    speculation = open_log(log).header.started.config.speculation
    assert speculation.method == "mtp" and 0 < speculation.row_cost <= 1000


def refused(served: Path, sentence: str, **config: Any) -> None:
    with engines_here(), pytest.raises((StartFailed, ModelError, SettingsError), match=sentence):
        LLM(str(served), threads=1, executor="inproc", log="off", speculative_config=MTP | config)


def test_a_checkpoint_without_the_layer_is_refused(mimo: Path, tmp_path: Path) -> None:
    none = "has no layers for multi-token prediction that vnext reads .MiMo-7B, DeepSeek 3, Qwen 3.5 and Nemotron 3 have.: take another method"
    refused(save_target(tmp_path / "llama"), none)
    refused(changed(mimo, tmp_path / "none", num_nextn_predict_layers=0), none)
    refused(changed(mimo, tmp_path / "many", num_nextn_predict_layers="two"), "num_nextn_predict_layers must be a whole number")
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4}
    refused(changed(mimo, tmp_path / "windows", **windows), "the model has attention windows: take another method")
    refused(mimo, "takes a model with method draft_model or eagle3, and method mtp is given", model=str(mimo))


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("mtp_layers", "no tensors model.mtp_layers.0.., which config.json names"),
        ("self_attn.v_proj.bias", "no tensor 'model.mtp_layers.0.self_attn.v_proj.bias'"),
    ],
)
def test_a_checkpoint_that_has_lost_tensors_is_refused(part: str, sentence: str, mimo: Path, tmp_path: Path) -> None:
    """It serves without drafts."""
    model = changed(mimo, tmp_path / "lost")
    tensors = load_file(model / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not ("mtp_layers" in name and part in name)}
    save_file(left, model / "model.safetensors")
    refused(model, sentence)
    with engines_here(), LLM(str(model), threads=1, executor="inproc", log="off") as llm:
        assert llm.generate("one two", use_tqdm=False)[0].outputs[0].token_ids
