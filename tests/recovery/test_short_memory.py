"""Memory that runs short while an engine serves: every stream goes on with the same text, and the log names each shortage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_here import engines_here

from vnext import LLM, SamplingParams
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.batch import masks
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.engine import recovery
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.runtime.rank import replica
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.transport.collectives.errors import shortage_of
from vnext.sched import shortage
from vnext.sim.rng import Rng
from vnext.state.events import AnyEvent, EngineRecovered, MemoryRanShort, StepLimitRaised
from vnext.state.state import State

COUNT = 200
ERRORS: tuple[Exception, ...] = (
    MemoryError(), MemoryError("Unable to allocate 1.5 GiB for an array with shape (9, 9) and data type float32"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is free."),
    RuntimeError("CUDA error: out of memory"),
)  # fmt: skip
PROMPTS = [f"{'The module is here. ' * (place % 5)}Number {place}" for place in range(24)]
PARAMS = [
    SamplingParams(temperature=(0.0, 0.9)[place % 2], seed=place, max_tokens=24 + 9 * (place % 4), ignore_eos=True, presence_penalty=0.5 * (place % 3))
    for place in range(24)
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in step": {"async_scheduling": False},
    "no cache": {"enable_prefix_caching": False},
    "tight": {"num_gpu_blocks_override": 40},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


class Shim:
    """In place of ModelRunner.run: now and then memory lacks, before a step, behind it, or when it has overwritten all that it was to
    write. Mutable."""

    def __init__(self, count: int, percent: int) -> None:
        self.left, self.given, self._percent, self._rng = count, 0, percent, Rng(count)
        self._run: Callable[..., Any] = ModelRunner.run

    def __call__(self, runner: ModelRunner, inputs: StepInputs) -> object:
        if not self.left or runner.draft is not None or not self._rng.happens(self._percent):
            return self._run(runner, inputs)
        self.left, self.given = self.left - 1, self.given + 1
        if kind := self._rng.below(3):
            self._run(runner, inputs)
        if kind == 2:
            pages, places = np.divmod(np.unique(np.asarray(inputs.forward.slots)), 16)
            for key, value in zip(*[iter(runner.cache_memory())] * 2, strict=True):
                key[pages, :, places], value[pages, :, places] = 77, 77
        raise self._rng.choose(ERRORS)


def answers(folder: Path, shim: Shim | None = None, **settings: Any) -> list[tuple[str, str]]:
    """The texts and the ends of all prompts at once, rounds of them while the shim has errors left."""
    found = []
    with engines_here(), pytest.MonkeyPatch.context() as patch, LLM(
        DEMO_MODEL, executor="inproc", threads=1, block_size=16, max_num_batched_tokens=96, log_dir=str(folder), **settings
    ) as llm:
        if shim is not None:
            patch.setattr(ModelRunner, "run", lambda runner, inputs: shim(runner, inputs))
        while not found or (shim is not None and shim.left):
            made = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found.append([(each.outputs[0].text, str(each.outputs[0].finish_reason)) for each in made])
    assert all(each == found[0] for each in found)
    return found[0]


def log_in(folder: Path) -> Path:
    return next(each for each in folder.iterdir() if each.suffix != ".key")


def events_of(folder: Path) -> list[AnyEvent]:
    return [event for item in open_log(log_in(folder)).items() for event in getattr(item, "events", ())]


@pytest.mark.parametrize("way", WAYS)
def test_no_stream_is_lost_and_no_text_differs(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "STUCK_S", 0.0)
    monkeypatch.setattr(shortage, "SUFFICED_MAX", 64)
    right = answers(tmp_path / "calm", **WAYS[way])
    shim = Shim(COUNT if way == "plain" else 40, 15)
    assert answers(tmp_path / "short", shim, **WAYS[way]) == right
    events = events_of(tmp_path / "short")
    found = [event for event in events if isinstance(event, MemoryRanShort)]
    assert len(found) == shim.given == (COUNT if way == "plain" else 40) and not shim.left
    assert all(event.cause.startswith("rank 0 lacks memory") for event in found)
    assert all(any(said in event.cause for event in found) for said in ("1.5 GiB", "CUDA out of memory")) and any(isinstance(event, StepLimitRaised) for event in events)
    assert replay(["verify", "--laws", str(log_in(tmp_path / "short"))]) == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), ERRORS[2], RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[CUresult.CUDA_ERROR_OUT_OF_MEMORY] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"), torch.OutOfMemoryError(),
        ImportError("a.so: cannot map zero-fill pages: Cannot allocate memory"), RuntimeError("can't start new thread"),
    ],
)  # fmt: skip
def test_every_way_to_say_that_memory_lacks_is_heard(error: Exception) -> None:
    assert shortage_of(error, 3).startswith("rank 3 lacks memory")
    assert not shortage_of(type(error)("another thing"), 3) or isinstance(error, MemoryError | torch.OutOfMemoryError)


def test_a_grammar_finds_out_that_there_is_no_room_before_its_process_ends() -> None:
    """llguidance alone aborts the process."""
    program = """if True:
        import resource, numpy as np
        from pathlib import Path
        from vnext.runtime.batch.masks import ROOM_BYTES, RowMasks
        from vnext.runtime.processes.launch import DEMO_MODEL
        from vnext.sampling.constraint import Vocabulary
        from vnext.state.params import Constraint
        masks = RowMasks(2, Vocabulary(Path(DEMO_MODEL), 4096, (0,)))
        masks.join(0, Constraint(grammar="start: /[a-z]+/"), [])
        masks.wait()
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES // 2, resource.RLIM_INFINITY))  # the C library needs some itself
        kept = masks.of(np.array([0]))
        for ask in (lambda: masks.join(1, Constraint(grammar="start: /[0-9]+/"), []), lambda: masks.take(kept, np.array([7]))):
            ask()
            try:
                masks.wait()
            except MemoryError as error:
                print(error, sorted(masks.drop()))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"a grammar may need 16 MiB: Cannot allocate memory [{place}]" for place in (1, 0)], done.stderr


def test_memory_that_lacks_for_a_grammar_is_lacking_for_every_row_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are too small for all rows, so that some are not in the step whose wait hears that their masks could not be made."""
    params = [
        SamplingParams(temperature=0.9, seed=place, max_tokens=48, structured_outputs=StructuredOutputsParams(regex=f"[a-z]{{30,40}}{place}"))
        for place in range(12)
    ]
    right, rng, room = grammatical(tmp_path / "calm", params), Rng(7), masks.require_room

    def lacking() -> None:
        if rng.happens(8):
            raise MemoryError
        room()

    monkeypatch.setattr(masks, "require_room", lacking)
    monkeypatch.setattr(recovery, "STUCK_S", 0.0)
    monkeypatch.setattr(shortage, "SUFFICED_MAX", 64)
    assert grammatical(tmp_path / "short", params) == right and {each for _, each in right} <= {"stop", "length"}
    found = [type(event) for event in events_of(tmp_path / "short")]
    assert sum(issubclass(each, MemoryRanShort) for each in found) >= 5 and EngineRecovered not in found
    assert replay(["verify", "--laws", str(log_in(tmp_path / "short"))]) == 0


def grammatical(folder: Path, params: list[SamplingParams]) -> list[tuple[str, str]]:
    with engines_here(), LLM(
        DEMO_MODEL, executor="inproc", threads=1, block_size=16, max_num_batched_tokens=64, max_num_seqs=12, log_dir=str(folder),
        scheduling_policy="vnext.sim.sample_policies:scattered",
    ) as llm:
        made = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [(each.outputs[0].text, str(each.outputs[0].finish_reason)) for each in made]


def test_memory_that_lacks_for_the_report_of_a_step_is_a_shortage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, details = Rng(7), replica.details

    def lacking(state: State) -> tuple[int, ...]:
        if rng.happens(10):
            raise MemoryError
        return details(state)

    right = answers(tmp_path / "calm")
    monkeypatch.setattr(replica, "details", lacking)
    monkeypatch.setattr(recovery, "STUCK_S", 0.0)
    assert answers(tmp_path / "short", digest_interval=1) == right
    found = [type(event) for event in events_of(tmp_path / "short")]
    assert sum(issubclass(each, MemoryRanShort) for each in found) >= 5 and EngineRecovered not in found
    assert replay(["verify", "--laws", str(log_in(tmp_path / "short"))]) == 0
