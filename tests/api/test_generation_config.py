"""Tests of generation_config.json: it sets the defaults of requests over HTTP, in LLM and in the log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_here import engines_here

from vnext import LLM, SamplingParams
from vnext.api.generation_config import sampling_defaults
from vnext.log.codec import Frame
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import DEMO_MODEL, StartFailed
from vnext.runtime.protocol.sampling_params import SamplingDefaults
from vnext.state.events import RequestArrived

SAID = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.25, "max_new_tokens": 5, "do_sample": False}
SAID |= {"suppress_tokens": [3, 1], "begin_suppress_tokens": [2], "max_initial_timestamp_index": 7}
TAKEN = SamplingDefaults(temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.25, max_tokens=5, suppressed=(3, 1), suppressed_first=(2,), latest_first=(7,))


def model(folder: Path, said: dict[str, Any] | str) -> Path:
    """The demo model with another generation_config.json."""
    path = folder / "model"
    shutil.copytree(DEMO_MODEL, path)
    (path / "generation_config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def test_what_is_taken_from_the_file(tmp_path: Path) -> None:
    path = model(tmp_path, SAID | {"num_beams": 4, "min_p": None, "transformers_version": "5"})
    assert sampling_defaults(path) == TAKEN
    assert sampling_defaults(path, False) == SamplingDefaults()
    (path / "generation_config.json").unlink()
    assert sampling_defaults(path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{", "cannot be read as JSON .*; download the model again, or leave it alone with --generation-config none"),
        ('["temperature"]', "must hold a JSON object but holds list, or leave it alone"),
        ({"temperature": "hot"}, "temperature has a wrong type: expected .*; correct it, or leave it alone with"),
        ({"suppress_tokens": "x"}, "suppress_tokens .*; correct generation_config.json, or leave it alone with"),
        ({"top_p": 0}, "top_p is 0: it must be more than 0 and at most 1; correct it"),
        ({"max_new_tokens": 0}, "max_tokens is 0: it must be at least 1, .*; correct it"),
    ],
)
def test_a_broken_file_is_one_sentence(said: dict[str, Any] | str, words: str, tmp_path: Path) -> None:
    path = model(tmp_path, said)
    with pytest.raises(StartFailed, match=words):
        LLM(path, executor="inproc", log="off")
    assert sampling_defaults(path, False) == SamplingDefaults()


def logged(log_dir: str) -> list[tuple[float, int, float, int]]:
    """Of each request in a log: temperature, top_k, repetition_penalty, max_tokens."""
    frames = (item for item in open_log(Path(log_dir)).items() if isinstance(item, Frame))
    arrived = (event.sampling for frame in frames for event in frame.events if isinstance(event, RequestArrived))
    return [(each.temperature, each.top_k, each.repetition_penalty, each.max_tokens) for each in arrived]


def test_llm_takes_them_where_it_is_given_none_and_logs_what_came_of_it(tmp_path: Path) -> None:
    path, common = model(tmp_path, SAID | {"eos_token_id": [1, 2, 3]}), {"executor": "inproc", "threads": 1}
    with engines_here(), LLM(path, log_dir=tmp_path / "logs", **common) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.5, top_k=7, top_p=0.9, repetition_penalty=1.25, max_tokens=5
        )
        assert llm._client.ready.config.eos_token_ids == (1, 2, 3, 0), "config.json has the last"
        llm.generate("The module", use_tqdm=False)
        llm.generate("The module", SamplingParams(max_tokens=2), use_tqdm=False)
        longest = [5] * (llm.max_model_len - 2)
        (answer,) = llm.generate([longest], use_tqdm=False)
        assert 1 <= len(answer.outputs[0].token_ids) <= 2, "a usual length gives way to the model's"
    assert logged(llm.log_dir) == [(0.5, 7, 1.25, 5), (1.0, 0, 1.0, 2), (0.5, 7, 1.25, 2)]
    with engines_here(), LLM(path, log="off", generation_config="none", **common) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm._client.ready.config.eos_token_ids != (1, 2, 3)
