"""What comes back: names, times, plain dictionaries; the tokenizer that transformers would give; one error after the end."""

from __future__ import annotations

import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from engine_here import engines_here
from transformers import AutoTokenizer

from vnext import LLM, AsyncLLM, EngineDead, SamplingParams
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol import merged_output

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is Python?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with engines_here(), LLM(executor="inproc", threads=1, seed=11, log="off", log_dir=tmp_path_factory.mktemp("logs")) as engine:
        yield engine


def test_each_request_has_a_name_and_times(llm: LLM) -> None:
    before_s = time.time()
    found = llm.generate(["What is", "import"], SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True), use_tqdm=False)
    found += llm.chat(TALK, PARAMS, use_tqdm=False)
    assert len({each.request_id for each in found}) == 3 and all(each.request_id and each.finished for each in found)
    for each in found:
        times = each.metrics
        assert before_s <= times.arrival_time <= times.first_token_time <= times.finished_time <= time.time()
        assert times.first_token_latency == times.first_token_time - times.arrival_time
        assert 0 < times.time_in_queue < times.first_token_latency
        assert times.num_generation_tokens == sum(len(answer.token_ids) for answer in each.outputs)


def test_a_first_token_comes_before_a_long_answer_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the answer is taken whole. A second passes with each look at the clock; there is one at the first token."""
    seconds = itertools.count(1)
    monkeypatch.setattr(merged_output, "time", SimpleNamespace(time=lambda: float(next(seconds))))
    (found,) = llm.generate("import", SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert (found.metrics.first_token_time, found.metrics.finished_time) == (1.0, 2.0)


def test_a_stopped_answer_and_a_beam_have_an_end(llm: LLM) -> None:
    text = llm.generate("What is", PARAMS, use_tqdm=False)[0].outputs[0].text
    (stopped,) = llm.generate("What is", SamplingParams(temperature=0.0, max_tokens=500, stop=text[4:7]), use_tqdm=False)
    (beam,) = llm.beam_search("What is", {"beam_width": 2, "max_tokens": 4})
    assert stopped.outputs[0].finish_reason == "stop" and stopped.metrics.finished_time > stopped.metrics.first_token_time
    assert beam.finished and beam.metrics.finished_time > beam.metrics.arrival_time and beam.metrics.first_token_time is None


def test_results_become_plain_dictionaries(llm: LLM) -> None:
    (found,) = llm.generate("What is", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0), use_tqdm=False)
    plain = found.to_dict()
    assert plain["outputs"][0]["token_ids"] == found.outputs[0].token_ids and plain["metrics"]["arrival_time"]
    token = found.outputs[0].token_ids[0]
    assert plain["outputs"][0]["logprobs"][0][token]["logprob"] == found.outputs[0].logprobs[0][token].logprob
    for each in (found, *llm.embed("What is"), *llm.score("What is", " it")):
        assert json.loads(json.dumps(each.to_dict()))["prompt_token_ids"] == each.prompt_token_ids


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(DEMO_MODEL)
    for text in ("The module", "  def f(x):\n", "<|user|>hi<|end|>"):
        assert ours.encode(text) == theirs.encode(text) == ours(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert ours.decode(ours.encode(text), skip_special_tokens=True) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert (ours.eos_token, ours.eos_token_id, len(ours)) == (theirs.eos_token, theirs.eos_token_id, len(theirs))
    assert (ours.bos_token, ours.bos_token_id) == (theirs.bos_token, theirs.bos_token_id)
    for given in ({}, {"add_generation_prompt": True}):
        text = ours.apply_chat_template(TALK, tokenize=False, **given)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, **given)
        assert ours.apply_chat_template(TALK, **given) == ours.encode(text, add_special_tokens=False)
    (answer,) = llm.chat(TALK, PARAMS, use_tqdm=False)
    assert answer.prompt_token_ids == ours.apply_chat_template(TALK, add_generation_prompt=True)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_signature_lists_every_option(kind: type) -> None:
    options = inspect.signature(kind).parameters
    assert options["max_num_seqs"].default == 256 and options["max_num_seqs"].annotation is int
    assert options["quantization"].annotation == Literal["auto", "none", "int8", "int4", "codes"]
    assert [*options][0] == "model" and options["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert inspect.signature(kind).bind("folder", max_model_len=4)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    with engines_here(), LLM(executor="inproc", threads=1, log="off", log_dir=tmp_path_factory.mktemp("logs")) as engine:
        pass
    return engine


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.__enter__(),
        lambda llm: llm.generate([]),
        lambda llm: llm.chat(TALK),
        lambda llm: next(llm.stream_chat(TALK)),
        lambda llm: llm.beam_search("a", {"beam_width": 2}),
        lambda llm: llm.embed("a"),
        lambda llm: llm.score("a", "b"),
        lambda llm: llm.sleep(),
        lambda llm: llm.residence,
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.update_weights({}),
        lambda llm: llm.start_weight_update(),
        lambda llm: llm.collective_rpc("weights_digest"),
    ],
)
def test_one_error_after_the_end(closed: LLM, call: Callable[[LLM], Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDead, match="^This program has closed the engine: start another one.$"):
        call(closed)
    assert capfd.readouterr() == ("", ""), "and no bar"


def test_what_needs_no_engine_goes_on(closed: LLM, tmp_path: Path) -> None:
    assert closed.get_tokenizer().encode("a") and closed.get_default_sampling_params() and closed.log_dirs == ()
