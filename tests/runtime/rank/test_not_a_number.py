"""Weights, or an adapter, that make no numbers: each request ends with an error, is counted, and one line says so."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file, save_file
from saved_adapters import save_adapter

from vnext import LLM, SamplingParams
from vnext.runtime.batch.step_outputs import spoilt_rows
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.rank.weights import FUNCTIONS

NAN = float("nan")
SENTENCE = r"the model computes what is no number \(NaN\)"
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=3, max_tokens=8, ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "logprobs": SamplingParams(temperature=0, max_tokens=4, logprobs=3),
    "schema": SamplingParams(max_tokens=20, structured_outputs={"regex": "[ab]{2,4}"}),
    "penalties": SamplingParams(presence_penalty=1.0, max_tokens=4, bad_words=["the"]),
    "scores": SamplingParams(max_tokens=1, prompt_logprobs=0),
}


def spoilt(folder: Path, *places: tuple[str, int]) -> Path:
    """The demo model with a NaN at the beginning of these rows."""
    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, row in places:
        tensors[name].view(-1)[row * (tensors[name].shape[-1] if tensors[name].dim() > 1 else 1)] = NAN
    save_file(tensors, folder / "model.safetensors")
    return folder


def made(model: Path, **settings: Any) -> LLM:
    return LLM(model, **{"executor": "inproc", "threads": 1, "log": "off", "max_num_batched_tokens": 32, **settings})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [("model.layers.1.mlp.down_proj.weight", 3), ("model.norm.weight", 5)], ids=["layer", "norm"])
def test_no_request_gets_what_is_no_number(tmp_path: Path, dtype: str, place: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    model = spoilt(tmp_path / "model", place)
    with caplog.at_level(logging.ERROR), engines_here(), made(model, dtype=dtype) as llm:
        for params in WAYS.values():
            for prompt in ("The module", "word " * 40):
                with pytest.raises(InvalidRequest, match=SENTENCE):
                    llm.generate(prompt, params, use_tqdm=False)
        for pooling in ("last", "mean", "cls"):
            with pytest.raises(InvalidRequest, match=SENTENCE):
                llm.embed("The module is", pooling=pooling)
        with pytest.raises(InvalidRequest, match=SENTENCE):
            llm.score("The module", " is")
    assert len([message for message in caplog.messages if "no number" in message]) == 1


def test_a_head_with_one_row_that_is_no_number(tmp_path: Path) -> None:
    """All other logits are numbers; the token whose logit is none would be the answer's every token."""
    model = spoilt(tmp_path / "model", ("model.embed_tokens.weight", 700))
    with engines_here(), made(model) as llm:
        for params in (WAYS["greedy"], WAYS["sampled"], WAYS["logprobs"]):
            with pytest.raises(InvalidRequest, match=SENTENCE):
                llm.generate("The module", params, use_tqdm=False)


FORMS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2, "executor": "mp"},
    "stages": {"pipeline_parallel_size": 2, "executor": "mp"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS)
def test_in_every_form_of_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = spoilt(tmp_path / "model", ("model.norm.weight", 5))
    with LLM(model, **{"threads": 1, "log": "off", **settings}) as llm:
        with pytest.raises(InvalidRequest, match=SENTENCE):
            llm.generate([[5, 6, 7] * 8, "The module"], WAYS["greedy"], use_tqdm=False)


def test_only_the_adapter_s_requests_end(tmp_path: Path) -> None:
    adapter = save_adapter(DEMO_MODEL, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    large = {name: torch.full_like(each, 3e38) for name, each in tensors.items()}  # finite, and their product is not
    save_file(large, adapter / "adapter_model.safetensors")
    with engines_here(), made(DEMO_MODEL, enable_lora=True, dtype="float32") as llm:
        (plain,) = llm.generate("The module", WAYS["greedy"], use_tqdm=False)
        with pytest.raises(InvalidRequest, match=SENTENCE):
            llm.generate("The module", WAYS["greedy"], use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter)))
        (again,) = llm.generate("The module", WAYS["greedy"], use_tqdm=False)
        assert again.outputs[0].token_ids == plain.outputs[0].token_ids


def test_an_answer_ends_where_numbers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer, in steps that are one call of the kernels."""
    monkeypatch.setitem(FUNCTIONS, "spoil", lambda runner: runner.weights.params.norm.fill(NAN))
    with engines_here(), made(DEMO_MODEL, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        pieces = llm.stream_chat([{"role": "user", "content": "What is Python?"}], params)
        for _ in range(5):
            next(pieces)
        llm.collective_rpc("spoil")
        with pytest.raises(InvalidRequest, match=SENTENCE):
            list(pieces)


def test_rows_are_found_by_their_tokens() -> None:
    logits = np.array([[0.0, 1.0, 2.0], [NAN, NAN, NAN], [0.0, NAN, 5.0], [-math.inf, 1.0, -math.inf]], np.float32)
    assert spoilt_rows(logits, np.array([2, 0, 1, 1])) == (1, 2)
    assert spoilt_rows(np.zeros((0, 3), np.float32), np.zeros(0, np.int64)) == ()
