"""Benchmark of a step's cost beside its kernels, at batch 1 and 32. `python -m pytest perf/bench_step_overhead.py`

Runs one engine of the 135 M shape in this process: the engine core and its rank take turns, so that every microsecond belongs
to one of them. Kernel time is the time of the calls into the compiled module. With rank processes (the default) the engine
core works while a rank computes, which hides its cost, but not the rank's work between kernels. A second test measures such
an engine from a client: the time between tokens, and the processor time per token of its other processes, which compete with
the kernels for the cores.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from perf.bench_startup import THREADS
from perf.peers.sessions import checkpoint
from vnext.api.llm import LLM
from vnext.kernels.cpu import native
from vnext.runtime.engine.process import make_executor, start_core
from vnext.runtime.protocol.messages import SubmitRequest, encoder
from vnext.runtime.protocol.sampling_params import SamplingParams, to_sampling
from vnext.runtime.protocol.settings import CoreSettings, EngineSettings
from vnext.state.events import pack_tokens

PROMPT_LENGTH = 64
STEPS = 200
WARM_STEPS = 20
TURNS = 80  # turns of the engine core's loop, two steps each


class Clock:
    """A proxy that sums the time spent in an object's functions."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._target, name)
        if not callable(function):
            return function

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(self, name, timed)
        return timed


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint("llama-135m", 0)


@contextmanager
def engine(model: Path) -> Iterator[tuple[Any, Any, Clock, zmq.Socket]]:
    """Yield (engine core, its rank's executor, the clock around the kernels, a client's socket)."""
    kernels = native._native
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        front, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        address, engine_settings = f"ipc://{folder}/engine", EngineSettings(executor="inproc", threads=THREADS)
        front.bind(address)
        client.connect(address)
        settings = CoreSettings(
            engine=engine_settings, model_path=str(model), address=address, run_dir=folder, log_dir=f"{folder}/log"
        )
        executor = make_executor(settings, ())
        core, _ = start_core(settings, executor, front, None)
        clock = native._native = Clock(kernels)
        try:
            yield core, executor, clock, client
        finally:
            native._native = kernels
            core.shut_down()
            front.close(linger=0)
            client.close(linger=0)


def submit(client: zmq.Socket, batch_size: int) -> None:
    asked = SamplingParams(temperature=0, max_tokens=4 * TURNS, ignore_eos=True)
    for index in range(batch_size):
        prompt = [100 + index, *range(PROMPT_LENGTH - 1)]
        sampling = to_sampling(asked, 0, len(prompt), 2048)
        client.send(encoder.encode(SubmitRequest(name=str(index), prompt=pack_tokens(prompt), sampling=sampling)))


@pytest.mark.parametrize("batch_size", (1, 32))
def test_parts_of_a_step(benchmark, model: Path, batch_size: int) -> None:
    parts: list[tuple[float, ...]] = []
    with engine(model) as (core, executor, clock, client):
        rank = Clock(executor)
        core._executor = rank
        submit(client, batch_size)
        while core.state.planned < WARM_STEPS or len(core.state.rows) < batch_size:
            core.step()

        def step() -> None:
            began, planned, clock.seconds, rank.seconds = time.perf_counter(), core.state.planned, 0.0, 0.0
            core.step()
            whole, count = time.perf_counter() - began, core.state.planned - planned
            parts.append(tuple(part / count for part in (clock.seconds, rank.seconds - clock.seconds, whole - rank.seconds)))

        benchmark.pedantic(step, rounds=TURNS)
        assert len(core.state.rows) == batch_size, "every request is still running"
    kernels, rank_apart, core_apart = (1e6 * statistics.median(each) for each in zip(*parts))
    whole = kernels + rank_apart + core_apart
    benchmark.extra_info.update(
        batch_size=batch_size,
        kernels_us=round(kernels),
        rank_beside_kernels_us=round(rank_apart),
        engine_core_us=round(core_apart),
        rank_beside_kernels_mean_us=round(1e6 * statistics.mean(part[1] for part in parts)),  # includes new-block steps
        beside_kernels_share=round((rank_apart + core_apart) / whole, 4),
        not_hidden_share=round(rank_apart / (kernels + rank_apart), 4),
    )


def test_from_token_to_token(benchmark, model: Path) -> None:
    """An engine with a rank process and one request: time per token, and processor time per token of each process."""
    lengths = (1, 1 + STEPS)
    with tempfile.TemporaryDirectory() as logs, LLM(str(model), threads=THREADS, log_dir=logs) as llm:
        children = {child: child.cmdline() for child in psutil.Process().children(recursive=True)}
        processes = {"program": psutil.Process()} | {
            words[words.index("-m") + 1].split(".")[2]: child for child, words in children.items() if "-m" in words
        }
        seconds: dict[int, list[float]] = {length: [] for length in lengths}
        prompts = iter([[200 + index, *range(PROMPT_LENGTH - 1)] for index in range(100)])

        def ask(length: int) -> None:
            began = time.perf_counter()
            llm.generate([next(prompts)], SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), use_tqdm=False)
            seconds[length].append(time.perf_counter() - began)

        for length in lengths:
            ask(length)
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        benchmark.pedantic(ask, (lengths[1],), rounds=8)
        spent = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
        for _ in range(8):
            ask(lengths[0])
    medians = [statistics.median(seconds[length]) for length in lengths]
    benchmark.extra_info["token_us"] = round(1e6 * (medians[1] - medians[0]) / STEPS)
    benchmark.extra_info["computing_a_token_us"] = {
        name: round(1e6 * each / 8 / lengths[1]) for name, each in spent.items() if name != "rank"
    }
