"""Logs of engines with LoRA adapters: exec gives every token again, fork loads adapters in its futures, and what does not know
adapters refuses such a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_here import engines_here
from saved_adapters import DEMO, save_adapter

from vnext.llm import LLM
from vnext.lora_request import LoRARequest
from vnext.replay.futures.fork import states_at
from vnext.replay.futures.forking import future_of, future_options
from vnext.replay.reading.source import open_log
from vnext.sampling_params import SamplingParams
from vnext.state.events import AdapterEvicted, AdapterLoaded

LATER = ("--steps", "40:90")
PROMPTS = ["The module", "What is", "Return the", "def main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [save_adapter(DEMO, parent / name, seed, rank=3 + 5 * seed, lora_alpha=1) for seed, name in enumerate(("sql", "fr", "de"))]


@pytest.fixture(scope="module")
def log(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters and none in two slots; blocks are scarce."""
    settings = {"num_blocks_override": 13, "max_model_len": 48, "max_num_batched_tokens": 24, "block_size": 4, "digest_interval": 3}
    each = [None, *(LoRARequest(folder.name, 1, str(folder)) for folder in folders)] * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    params = [SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=14, ignore_eos=True) for at in range(len(prompts))]
    with engines_here(), LLM(
        executor="inproc", threads=1, enable_lora=True, max_loras=2, log="full", log_dir=str(tmp_path_factory.mktemp("log")),
        dtype="float32", **settings,
    ) as llm:  # fmt: skip
        llm.generate(prompts, params, False, each)
    return Path(llm.log_dir)


@pytest.mark.parametrize("extra", [(), ("--solo",), ("--tp", "2"), LATER, ("--kernels", "torch", "--steps", ":20")], ids=" ".join)
def test_every_token_comes_out_again(log, answer, extra):
    code, found = answer("exec", log, *extra)
    assert (code, found["same"], found["differ"]) == (0, True, 0)
    assert found["tokens"] > (10 if "--steps" in extra else 200)
    assert (found["rebuilt_tokens"] > 0) == (extra == LATER)


def test_an_adapter_that_is_elsewhere_or_another_is_a_sentence(log, folders, sentence):
    folder = folders[0]
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "has changed since it was named" in sentence("exec", log)
        weights.unlink()
        assert "has no adapter_model.safetensors" in sentence("exec", log, "--solo")
    finally:
        weights.write_bytes(content)


def test_futures_load_adapters(log, answer):
    code, found = answer("fork", log, "60", "--points", "2", "--forks", "6", "--steps", "150")
    assert (code, found["forks"], found["failed"]) == (0, 6, 0)
    state, reported = states_at(open_log(log), [60])[60], []
    options = future_options(open_log(log), 150, 20, 5)
    assert future_of(state, 1, options, lambda before, event, after: reported.append(event)).kind == ""
    for kind in (AdapterLoaded, AdapterEvicted):
        assert sum(isinstance(event, kind) for event in reported) > 5


def test_verify_knows_adapters_and_what_does_not_says_so(log, answer, sentence):
    assert answer("verify", "--laws", log)[0] == 0
    for command in (("what-if", log, "--sweep", "max_num_seqs=4,8"), ("bisect", log)):
        assert "was recorded with --enable-lora: this command does not know LoRA adapters yet" in sentence(*command)
