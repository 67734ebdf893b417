"""What of a checkpoint is left unread is named; what transformers writes for the families here is read, or known to be harmless."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file, save_file

from vnext import LLM
from vnext.models.config.json_keys import Watched
from vnext.models.loading.unread import unread, unread_members
from vnext.runtime.processes.launch import DEMO_MODEL

sys.path.append(str(Path(__file__).resolve().parents[1]))  # these two are shared with the models' other tests
from checkpoints import PLAIN  # noqa: E402
from family_cases import CASES, save_case  # noqa: E402


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_of_what_transformers_writes(tmp_path: Path, case: str) -> None:
    save_case(tmp_path, case)
    assert unread(tmp_path) == ""


def test_nothing_is_left_of_the_demo_model_and_of_a_bare_one(tmp_path: Path) -> None:
    assert unread(DEMO_MODEL) == ""
    save_case(tmp_path, "qwen3").model.save_pretrained(tmp_path / "body")
    assert unread(tmp_path / "body") == ""


def changed(path: Path, tensors: dict[str, torch.Tensor], name: str = "config.json", **members: Any) -> Path:
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    known = json.loads((path / name).read_text()) if (path / name).is_file() else {}
    (path / name).write_text(json.dumps(known | members))
    return path


def test_tensors(tmp_path: Path) -> None:
    save_case(tmp_path, "qwen2")
    harmless = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.vision_tower.x.weight",
                "model.layers.0.mlp.up_proj._weight_act_quant_scale")  # fmt: skip
    changed(tmp_path, {name: torch.zeros(3) for name in harmless})
    assert unread(tmp_path) == ""
    names = ["model.layers.0.self_attn.o_proj.bias", "model.layers.3.self_attn.q_proj.weight", "score.weight"]
    changed(tmp_path, {name: torch.zeros(3) for name in names})
    assert f"is not read, though elsewhere answers may depend on it: tensors {', '.join(names)}." in unread(tmp_path)
    changed(tmp_path, {f"a{at}": torch.zeros(1) for at in range(3)})
    assert "tensors a0, a1, a2, model.layers.0.self_attn.o_proj.bias and 2 more." in unread(tmp_path)


def test_members(tmp_path: Path) -> None:
    save_case(tmp_path, "gemma3")
    text = json.loads((tmp_path / "config.json").read_text()) | {"altup_num_inputs": 4}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "logit_scale": 0.25, "residual_multiplier": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"vision_config": {"x": 1}, "use_mup": True, "use_cache": True}))
    changed(tmp_path, {}, "generation_config.json", suppress_tokens=[5], no_repeat_ngram_size=0, num_beams=4, temperature=0.5)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": ""}]}))
    sentence = unread(tmp_path)
    assert "members of config.json altup_num_inputs, logit_scale, use_mup; " in sentence
    assert sentence.endswith("members of generation_config.json num_beams, suppress_tokens; chat templates rag.")


def test_windows_that_are_off_and_those_that_a_family_does_not_know() -> None:
    plain = PLAIN | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "max_window_layers": 1}
    assert unread_members(plain | {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}) == []
    llama = PLAIN | {"layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 5}
    assert unread_members(llama) == ["layer_types", "max_window_layers"]
    assert unread_members(PLAIN | {"layer_types": ["full_attention"] * 2}) == []


def test_a_watched_object_knows_what_was_asked_of_what_was_made_of_it() -> None:
    watched = Watched({"a": 1, "b": 2, "c": 3, "d": 4})
    joined = {"x": 0} | watched | {"b": 5}
    assert (joined["a"], joined.get("b"), "c" in joined, joined.get("x")) == (1, 5, True, 0)
    assert watched.asked == {"a", "b", "c", "x"} and dict(joined) == {"x": 0, "a": 1, "b": 5, "c": 3, "d": 4}


def test_a_start_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    changed(tmp_path / "model", {}, logit_scale=0.25)
    with caplog.at_level(logging.WARNING), engines_here(), LLM(tmp_path / "model", executor="inproc", threads=1, log="off"):
        pass
    assert [message for message in caplog.messages if "is not read" in message] == [unread(tmp_path / "model")]
