"""Another process takes a GPU's memory while an engine serves: no stream is lost, no text differs, and the log names each shortage.

The engine's rank computes by the CUDA kernels' own sources, in the memory of the shim's allocator, which refuses.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import llm_here
from heads.saved import save_mimo
from rank_drive import tiny_checkpoint
from short_device import DeviceMemory, ShortDevice

from vnext import LLM, SamplingParams
from vnext.kernels.table import Operations
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.batch.draft_batch import Run
from vnext.runtime.engine import recovery
from vnext.runtime.gpu.buckets import Shapes
from vnext.runtime.gpu.head_drafts import DeviceHeadDrafts
from vnext.runtime.gpu.pages import DevicePages
from vnext.runtime.gpu.staging import Staging
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.rank import gpu_loading
from vnext.sampling.sampling import adjust_by_kernel, choose_by_kernel, keep_allowed_by_kernel
from vnext.sched import shortage
from vnext.state.events import AnyEvent, EngineRecovered, MemoryRanShort, StepLimitRaised

COUNT, PER_SEED = 200, 25
LIMIT = 48
PROMPTS = [f"{'The module is here. ' * (place % 5)}Number {place}" for place in range(8)]
PARAMS = [
    SamplingParams(
        temperature=(0.0, 0.9)[place % 2], seed=place, max_tokens=6 + 5 * (place % 4), ignore_eos=True,
        presence_penalty=0.5 * (place % 3), logprobs=None if place % 4 else 2,
    )
    for place in range(8)
]  # fmt: skip
EAGER, DRAFTS = Shapes((), ()), {"num_speculative_tokens": 2, "row_cost": 0}
WAYS: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "eager": (EAGER, {}), "graphs": (Shapes((4, 8), (24, LIMIT)), {}),
    "ngram": (EAGER, {"speculative_config": DRAFTS | {"method": "ngram", "prompt_lookup_min": 1}}),
    "draft model": (EAGER, {"speculative_config": DRAFTS | {"method": "draft_model"}}),
}  # fmt: skip
HEAD = {"speculative_config": DRAFTS | {"method": "mtp"}, "digest_interval": 1}
Answers = list[tuple[str, str]]


@pytest.fixture
def memory(libraries: Path, kernels: Operations, monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    """Of the device of engines whose device is "cuda"; these soon take more again."""
    monkeypatch.setattr(gpu_loading, "operations", lambda device_type: kernels)
    monkeypatch.setattr(gpu_loading, "sampler_for", lambda device_type: choose_by_kernel)
    monkeypatch.setattr(gpu_loading, "logits_processor_for", lambda device_type: adjust_by_kernel)
    monkeypatch.setattr(gpu_loading, "masking_for", lambda device_type: keep_allowed_by_kernel)
    monkeypatch.setattr(recovery, "STUCK_S", 0.0)
    for module, name, steps in ((recovery, "SUFFICED", 8), (shortage, "SUFFICED", 8), (shortage, "SUFFICED_MAX", 16)):
        monkeypatch.setattr(module, name, steps)
    return DeviceMemory(libraries)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=3072, num_hidden_layers=1, eos_token_id=0)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def engine(device: ShortDevice, way: str, model: Path, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context with an LLM, whose rank computes on the device."""
    shapes, settings = (WAYS | {"head": (EAGER, HEAD)})[way]
    monkeypatch.setattr(gpu_loading, "open_device", lambda rank: device)
    monkeypatch.setattr(gpu_loading, "captured_shapes", lambda *_: shapes)
    fixed: dict[str, Any] = {"device": "cuda", "dtype": "float32", "block_size": 16, "num_blocks_override": 200, "digest_interval": 4}
    if (drafts := settings.get("speculative_config", {})).get("method") == "draft_model":
        settings = {"speculative_config": drafts | {"model": str(model)}}
    return llm_here(model, max_num_batched_tokens=LIMIT, log_dir=str(log_dir), **(fixed | settings))


def answers(llm: LLM, prompts: list[str] = PROMPTS) -> Answers:
    made = llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)
    return [(each.outputs[0].text, str(each.outputs[0].finish_reason)) for each in made]


def events_of(log_dir: Path) -> list[AnyEvent]:
    """Of the one log in the folder, which verifies."""
    (log,) = [each for each in log_dir.iterdir() if each.suffix != ".key"]
    assert replay(["verify", "--laws", str(log)]) == 0
    return [event for item in open_log(log).items() for event in getattr(item, "events", ())]


@pytest.mark.parametrize("seed", range(COUNT // PER_SEED // len(WAYS)))
@pytest.mark.parametrize("way", WAYS)
def test_no_stream_is_lost_whichever_request_of_a_step_is_refused(
    memory: DeviceMemory, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    """From the first step on, before anything has its buffers and graphs."""
    with memory.serving(), engine(ShortDevice(memory, seed), way, model, tmp_path / "calm", monkeypatch) as llm:
        right = answers(llm)
        assert memory.read("refused") == 0
    device, found = ShortDevice(memory, seed), list[Answers]()
    with memory.serving(), engine(device, way, model, tmp_path / "short", monkeypatch) as llm:
        device.shrink(PER_SEED)
        while device.left:
            found.append(answers(llm))
        assert memory.read("refused") == PER_SEED
    assert all(each == right for each in found)
    causes = [event.cause for event in events_of(tmp_path / "short") if isinstance(event, MemoryRanShort)]
    said = ("rank 0 lacks memory (CUDA out of memory. Tried to allocate ", "rank 0 lacks memory (CUDA error: out of memory)")
    assert len(causes) == PER_SEED and all(cause.startswith(said) for cause in causes)


def test_steps_of_half_the_tokens_fit_into_what_is_left_until_it_is_all_there_again(
    memory: DeviceMemory, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ShortDevice(memory, 0)
    with memory.serving(), engine(device, "eager", model, tmp_path / "log", monkeypatch) as llm:
        right, held = answers(llm), memory.read("held")
        memory.leave((memory.read("peak") - held) * 3 // 5)
        found = [answers(llm), answers(llm)]
        refused = memory.read("refused")
        memory.leave(-1)
        found += [answers(llm) for _ in range(4)]
        assert memory.read("refused") == refused > 0
    assert all(each == right for each in found)
    limits = [event.limit for event in events_of(tmp_path / "log") if isinstance(event, MemoryRanShort | StepLimitRaised)]
    assert limits[0] < LIMIT == limits[-1]


def test_penalties_do_not_count_what_was_drafted_when_memory_lacked(
    memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two drafts is refused memory: the first was counted."""
    model, step, turns = save_mimo(tmp_path / "model"), DeviceHeadDrafts._step, count()
    with memory.serving(), engine(ShortDevice(memory, 0), "head", model, tmp_path / "calm", monkeypatch) as llm:
        right = answers(llm)

    def refused(drafts: DeviceHeadDrafts, runs: Sequence[Run], depth: int | None) -> None:
        if depth == 1 and next(turns) % 3 == 1:
            memory.refuse(0)
        step(drafts, runs, depth)

    monkeypatch.setattr(DeviceHeadDrafts, "_step", refused)
    with memory.serving(), engine(ShortDevice(memory, 0), "head", model, tmp_path / "short", monkeypatch) as llm:
        assert answers(llm) == right and memory.read("refused") >= 3
    found = [type(event) for event in events_of(tmp_path / "short")]
    assert sum(issubclass(each, MemoryRanShort) for each in found) >= 3 and EngineRecovered not in found


@pytest.mark.parametrize("method", ["copy", "send"])
def test_a_block_that_lacks_memory_on_its_way_to_the_disk_or_back_costs_no_stream(
    memory: DeviceMemory, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """One engine writes blocks to the disk, and the next one reads them."""
    monkeypatch.setitem(WAYS, "disk", (EAGER, {"kv_disk_dir": str(tmp_path / "tier")}))
    move, turns, prompts = getattr(DevicePages, method), count(), [f"{place}: {'The module is here. ' * 9}" for place in range(4)]

    def refused(pages: DevicePages, *arguments: Any) -> Any:
        if next(turns) % 2 == 0:
            memory.refuse(0)
        return move(pages, *arguments)

    monkeypatch.setattr(DevicePages, method, refused)
    found = []
    for name in ("writes", "reads"):
        with memory.serving(), engine(ShortDevice(memory, 0), "disk", model, tmp_path / name, monkeypatch) as llm:
            found += [answers(llm, prompts) for _ in range(2)]
            if name == {"copy": "writes", "send": "reads"}[method]:
                assert memory.read("refused")
        events_of(tmp_path / name)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("behind", range(3))
def test_a_buffer_that_lacked_memory_for_one_half_gets_both(memory: DeviceMemory, behind: int) -> None:
    staging, numbers = Staging(ShortDevice(memory, 0), 1), np.arange(5)
    with memory.serving():
        memory.refuse(behind)
        with suppress(RuntimeError):
            staging.send({"numbers": numbers})
        assert torch.equal(staging.send({"numbers": numbers})["numbers"], torch.from_numpy(numbers))
        assert memory.read("refused") == (behind < 2), "two halves"
