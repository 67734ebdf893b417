"""Benchmark of a start: from exec to the first answer, and the memory of all processes. `python -m pytest perf/bench_startup.py`

Uses random weights in SmolLM-135M's shape, in the page cache; the first run creates the checkpoint in the folder of
`perf.peers`. The clock starts before the process. Memory is proportional: a page shared by two processes counts half for each.
Its bound is the size of the weights, plus the part of the cache that was ever written, plus 400 MB.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from perf.peers.sessions import checkpoint, environment, proportional_kib
from vnext.commands.bench.load.answers import Chunk
from vnext.commands.bench.load.blocking import BlockingClient

THREADS = 2
ROUNDS = 5
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
OVERHEAD_MB = 400
KV_BYTES_A_TOKEN = 30 * 2 * 3 * 64 * 2
LOAD = 16  # requests of 256 tokens with answers of 16, to measure memory under load


@pytest.fixture(scope="module")
def model() -> Path:
    folder = checkpoint("llama-135m", 0)
    for file in folder.iterdir():
        file.read_bytes()
    return folder


@pytest.fixture(params=["packed at each start", "mapped"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder of packed weights, which the first round fills, "" for none."""
    return str(tmp_path / "packed") if request.param == "mapped" else ""


@contextmanager
def serving(model: Path, weights: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `vnext serve` and yield it with its host:port once it is ready."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "vnext.commands.cli", "serve", str(model), "--port", "0", "--threads", str(THREADS)]
        server = subprocess.Popen(
            [*command, "--log-dir", logs, "--served-model-name", "m", "--packed-weights-dir", weights],
            stdout=subprocess.PIPE, text=True, env=environment(THREADS),
        )  # fmt: skip
        try:
            said = iter(server.stdout.readline, "")
            ready = next(line for line in said if line.startswith("vnext: try"))
            yield server, re.search(r"http://([\d.]+:\d+)", ready)[1]
        finally:
            server.terminate()
            server.stdout.read()
            server.wait(30)


def complete(address: str, prompts: list[list[int]], length: int) -> None:
    body = {"model": "m", "prompt": prompts, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    answer = BlockingClient(address, timeout_s=60).ask("/v1/completions", body, Chunk)
    assert answer.usage.completion_tokens == length * len(prompts)


def held_mb(server: subprocess.Popen[str]) -> dict[str, float]:
    """Return MB of 10^6 bytes per process, with shared pages divided among their users."""
    root = psutil.Process(server.pid)
    names = {process.pid: process.cmdline()[2].removeprefix("vnext.") for process in (root, *root.children(recursive=True))}
    return {name: round(proportional_kib(pid) * 1024 / 1e6, 1) for pid, name in names.items()}


def test_help(benchmark) -> None:
    command = [sys.executable, "-m", "vnext.commands.cli", "--help"]
    benchmark.pedantic(
        lambda: subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(1), check=True),
        rounds=2 * ROUNDS, warmup_rounds=1,
    )  # fmt: skip


def test_first_answer_of_a_server(benchmark, model: Path, weights: str) -> None:
    ends = []

    def start() -> None:
        server = serving(model, weights)
        ends.append(server)
        _, address = server.__enter__()
        complete(address, [PROMPT], 1)

    def end() -> None:
        for server in ends:
            server.__exit__(None, None, None)
        ends.clear()

    benchmark.pedantic(start, setup=end, rounds=ROUNDS, warmup_rounds=1)
    end()


def test_first_answer_of_a_program(benchmark, model: Path, weights: str) -> None:
    """`LLM(...)` in a fresh interpreter, as `perf.peers` measures it, plus the engine's shutdown."""
    program = (
        "import sys; from vnext import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], threads=int(sys.argv[2]), log='off', packed_weights_dir=sys.argv[3]) as llm:\n"
        f"    llm.generate([{PROMPT}], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)\n"
        "    print('first', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(model), str(THREADS), weights]
    ended = []

    def start() -> None:
        run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(THREADS))
        assert run.stdout.readline() == "first\n"
        ended.append(run)

    def end() -> None:
        while ended:
            ended.pop().communicate(timeout=30)

    benchmark.pedantic(start, setup=end, rounds=ROUNDS, warmup_rounds=1)
    end()


def test_memory(benchmark, model: Path) -> None:
    """Memory after one answer and after a load; the time is that of the load."""
    weights_mb = (model / "model.safetensors").stat().st_size / 1e6
    prompts = [[100 + i] * 256 for i in range(LOAD)]
    with serving(model) as (server, address):
        complete(address, [PROMPT], 1)
        benchmark.extra_info["first_answer_mb"] = held_mb(server)
        benchmark.pedantic(complete, (address, prompts, 16), rounds=1)
        loaded = held_mb(server)
    written_mb = LOAD * (256 + 16) * KV_BYTES_A_TOKEN / 1e6
    benchmark.extra_info["loaded_mb"] = loaded
    benchmark.extra_info["loaded_total_mb"] = round(sum(loaded.values()), 1)
    benchmark.extra_info["bound_mb"] = round(weights_mb + written_mb + OVERHEAD_MB, 1)
