"""Whole engines with a draft model: the answers are those without drafts, and a model that drafts for itself is always right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_drive import runner_of, tiny_checkpoint
from test_speculation import answers

from vnext import LLM
from vnext.models.errors import ModelError
from vnext.replay.cli.main import main
from vnext.runtime.processes.launch import DEMO_MODEL, StartFailed, StartRefused
from vnext.runtime.protocol.settings import SettingsError

ITSELF = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 5, "row_cost": 0}


def another_model(folder: Path, **changes: Any) -> Path:
    """A tiny random checkpoint with the demo model's vocabulary."""
    folder.mkdir()
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return tiny_checkpoint(folder, **({"vocab_size": 3072, "max_position_embeddings": 1024, "eos_token_id": 0} | changes))


def counters(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    (log,) = log_dir.iterdir()
    assert main(["verify", str(log), "--laws"]) == 0
    capsys.readouterr()
    assert main(["show", str(log), "--json"]) == 0
    found: dict[str, int] = json.loads(capsys.readouterr().out)["state"]["counters"]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"digest_interval": 1, "check_laws": True},
        {"async_scheduling": False, "block_size": 4},
        {"num_blocks_override": 40},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
        {"tensor_parallel_size": 2, "digest_interval": 1},
    ],
    ids=["every law", "in step", "preempted", "in pieces", "two ranks"],
)
def test_a_model_that_drafts_for_itself_is_right(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cache holds what the target's holds, after preemptions, hits in the prefix cache and prompts in pieces."""
    plain = {name: settings[name] for name in ("tensor_parallel_size",) if name in settings}
    found = answers(speculative_config=ITSELF, log="full", log_dir=str(tmp_path), **settings)
    assert found == answers(log="off", **plain)
    counts = counters(tmp_path, capsys)
    ranks = settings.get("tensor_parallel_size", 1)  # the draft model is whole, so its sums differ from those of two ranks
    assert counts["draft_tokens"] > 250 and counts["accepted_tokens"] >= counts["draft_tokens"] * (1 if ranks == 1 else 0.7)
    assert counts["preempted"] > 0 or "num_blocks_override" not in settings


def test_a_model_that_is_wrong_changes_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ITSELF | {"model": str(another_model(tmp_path / "model"))}
    log_dir = tmp_path / "log"
    assert answers(speculative_config=config, log="full", log_dir=str(log_dir)) == answers(log="off")
    counts = counters(log_dir, capsys)
    assert counts["draft_tokens"] > counts["accepted_tokens"]
    (log,) = log_dir.iterdir()
    assert main(["exec", str(log), "--threads", "1"]) == 0 and "every token is the same" in capsys.readouterr().out


def test_a_page_has_room_for_both_models(tmp_path: Path) -> None:
    target, draft = runner_of(), runner_of(another_model(tmp_path / "model"))
    own = target.block_bytes(16)
    target.draft = draft
    assert target.block_bytes(16) == own + draft.block_bytes(16) > own


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 512}, "vocabulary of 512 tokens, and the model has 3072"),
        ({"max_position_embeddings": 256}, "take --max-model-len 256"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
            "attention windows",
        ),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = another_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((StartFailed, ModelError, SettingsError), match=sentence):
        LLM(threads=1, log="off", speculative_config=ITSELF | {"model": str(folder)})


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = another_model(tmp_path / "model")
    text = (folder / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))  # the same, spelt otherwise
    config = ITSELF | {"model": str(folder)}
    with LLM(threads=1, log="off", speculative_config=config):
        pass
    first, second, *_ = vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises((StartFailed, SettingsError), match="with the model's tokenizer"):
        LLM(threads=1, log="off", speculative_config=config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"method": "draft_model"}, "no model is given"),
        ({"method": "ngram", "model": "somewhere"}, "method ngram is given"),
        (ITSELF | {"num_speculative_tokens": 65}, "between 1 and 64"),
        (ITSELF | {"model": "./no such folder"}, "there is no folder"),
    ],
)
def test_a_draft_model_that_cannot_be_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises((SettingsError, StartRefused), match=sentence):
        LLM(threads=1, log="off", speculative_config=config)
