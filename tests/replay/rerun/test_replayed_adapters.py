"""Logs of engines with LoRA adapters: exec gives every token again, bisect repeats what adapters add and names a fault in it,
and fork loads adapters in its futures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_here import engines_here
from saved_adapters import DEMO, save_adapter

from vnext.api.llm import LLM
from vnext.kernels.table import chosen_operations, substituted
from vnext.replay.cli.main import main
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.futures.fork import states_at
from vnext.replay.futures.forking import future_of, future_options
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.sched import residency
from vnext.state.events import AdapterEvicted, AdapterLoaded

LATER = ("--steps", "40:90")
TORCH = ("--kernels", "torch")
"""Plain torch takes seconds for a step: `words` adds which."""
DOWN_INPUTS = json.loads((DEMO / "config.json").read_text())["intermediate_size"]
PROMPTS = ["The module", "What is", "Return the", "def main"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [save_adapter(DEMO, parent / name, seed, rank=3 + 5 * seed, lora_alpha=1) for seed, name in enumerate(("sql", "fr", "de"))]


@pytest.fixture(scope="module")
def log(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters and none in two slots; blocks are scarce. Requests of two adapters come by turns, so steps have both."""
    settings = {"num_blocks_override": 13, "max_model_len": 48, "max_num_batched_tokens": 24, "block_size": 4, "digest_interval": 3}
    sql, fr, de = (LoRARequest(folder.name, 1, str(folder)) for folder in folders)
    each = [sql, fr, sql, fr, None, sql, fr, de, None, de, sql, de, sql, fr, None, fr]
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    params = [SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=14, ignore_eos=True) for at in range(len(prompts))]
    with engines_here(), LLM(
        executor="inproc", threads=1, enable_lora=True, max_loras=2, log="full", log_dir=str(tmp_path_factory.mktemp("log")),
        dtype="float32", **settings,
    ) as llm:  # fmt: skip
        llm.generate(prompts, params, False, each)
    return Path(llm.log_dir)


def first_of_two(log):
    """The first step that has rows of two adapters: the sooner, the sooner their files were read."""
    return next(step for step in Walk(log, Selection()).steps() if len(adapters_of(step.state)) > 1)


def words(log, extra):
    """The options of a case; plain torch repeats steps up to the first of two adapters, and not many more."""
    return (*TORCH, "--steps", f":{max(15, first_of_two(log).step + 1)}") if extra is TORCH else extra


@pytest.mark.parametrize("extra", [(), ("--solo",), ("--tp", "2"), LATER, TORCH], ids=" ".join)
def test_every_token_comes_out_again(log, answer, extra):
    code, found = answer("exec", log, *words(log, extra))
    assert (code, found["same"], found["differ"]) == (0, True, 0)
    assert found["tokens"] > (10 if extra in (LATER, TORCH) else 200)
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


ELSEWHERE = [(), ("--solo", *LATER), TORCH, ("--kernels", "portable", *LATER), ("--dtype", "bfloat16", "--steps", ":30")]


@pytest.mark.parametrize("extra", ELSEWHERE, ids=" ".join)
def test_no_operation_differs(log, answer, extra):
    code, found = answer("bisect", log, *words(log, extra))
    assert (code, found["same"], found["found"]) == (0, True, None)
    calls = {each["operation"]: each["calls"] for each in found["operations"]}
    assert calls["add_thin"] > calls["gated_linear"] > 0


def faulty(change):
    """The table, but that the part of an adapter is another where `change(result, x, parts)` is."""
    served = chosen_operations("cpu")

    def add_thin(product, x, parts, *shards):
        return change(served.add_thin(product, x, parts, *shards), x, parts)

    return substituted(served._replace(add_thin=add_thin))


def nudged_of_many(result, x, parts):
    """One unit in the last place of one element, where a batch has several adapters and the product the inputs of `down`."""
    if x.shape[1] == DOWN_INPUTS and len(parts._parts) > 1:
        row, column = int(parts._parts[1][1].tokens[0]), 2
        result[row, column] = torch.nextafter(result[row, column], torch.tensor(torch.inf))
    return result


def test_a_part_that_depends_on_the_batch_is_named(log, answer):
    first = first_of_two(log)
    with faulty(nudged_of_many):
        code, found = answer("bisect", log)
    named = found["found"]
    assert (code, named["operation"], named["weight"]) == (1, "add_thin", "layers.0.mlp.down.weight")
    assert (named["step"], named["layer"], named["elements_differ"]) == (first.step, 0, 1)
    request = first.state.requests[named["rows"][0]["request"]]
    assert request.sampling.adapter and answer("bisect", log)[0] == 0


def test_a_wrong_part_is_named_beside_plain_torch(log, answer):
    """Of the gated product: what is added to it is repeated before it is activated."""
    with faulty(lambda result, x, parts: result.mul_(1.01) if result.shape[1] == 2 * DOWN_INPUTS else result):
        code, found = answer("bisect", log, *words(log, TORCH))
    named = found["found"]
    assert (code, named["operation"], named["weight"]) == (1, "add_thin", "layers.0.mlp.gate_up.weight")


def adapters_of(state):
    return {state.requests[id_].sampling.adapter for id_ in state.in_flight[-1].ids.tolist()} - {""}


def test_ranks_are_refused(log, sentence):
    assert "what adapters add is compared on one rank: give --solo" in sentence("bisect", log, "--tp", "2")


def test_verify_decides_every_load_again(log, answer, monkeypatch):
    assert answer("verify", "--laws", log)[0] == 0
    right = residency._needed
    monkeypatch.setattr(residency, "_needed", lambda state: right(state)[::-1])
    code, found = answer("verify", log)
    assert code == 1 and found["decisions_differ"] > 0
    first = found["difference"]
    assert first["field"] == "adapter" and first["recorded"].endswith("into slot 0") and "into slot 0" in first["recomputed"]


def test_an_engine_that_reads_an_adapter_is_not_stuck(log, capsys):
    assert main(["watch", str(log), "--once", "--whole"]) == 0
    assert "all is well" in capsys.readouterr().out
