"""Starting: from exec to the first answer, and what all processes then hold. `python -m pytest perf/bench_startup.py`

A checkpoint of random weights in SmolLM-135M's shape, in the page cache; it is made on the first run, where `perf.peers`
keeps its own. The clock starts before the process does. Memory is proportional (a page that two processes have counts half
for each): the bound beside it is the weights, the cache as far as it was ever written, and 400 MB.
"""

from __future__ import annotations

import http.client
import json
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

THREADS = 2
ROUNDS = 5
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
OVERHEAD_MB = 400
KV_BYTES_A_TOKEN = 30 * 2 * 3 * 64 * 2
LOAD = 16  # requests of 256 tokens and answers of 16, to see memory while something runs


@pytest.fixture(scope="module")
def model() -> Path:
    folder = checkpoint("llama-135m", 0)
    for file in folder.iterdir():
        file.read_bytes()
    return folder


@contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`vnext serve` and its host:port, as soon as it says that it is ready."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "vnext.cli", "serve", str(model), "--port", "0", "--threads", str(THREADS)]
        server = subprocess.Popen(
            [*command, "--log-dir", logs, "--served-model-name", "m"],
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
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["usage"]["completion_tokens"] == length * len(prompts)


def held_mb(server: subprocess.Popen[str]) -> dict[str, float]:
    """MB of 10^6 bytes by process, shared pages shared out."""
    root = psutil.Process(server.pid)
    names = {process.pid: process.cmdline()[2].removeprefix("vnext.") for process in (root, *root.children(recursive=True))}
    return {name: round(proportional_kib(pid) * 1024 / 1e6, 1) for pid, name in names.items()}


def test_help(benchmark) -> None:
    command = [sys.executable, "-m", "vnext.cli", "--help"]
    benchmark.pedantic(
        lambda: subprocess.run(command, stdout=subprocess.DEVNULL, env=environment(1), check=True),
        rounds=2 * ROUNDS, warmup_rounds=1,
    )  # fmt: skip


def test_first_answer_of_a_server(benchmark, model: Path) -> None:
    ends = []

    def start() -> None:
        server = serving(model)
        ends.append(server)
        _, address = server.__enter__()
        complete(address, [PROMPT], 1)

    def end() -> None:
        for server in ends:
            server.__exit__(None, None, None)
        ends.clear()

    benchmark.pedantic(start, setup=end, rounds=ROUNDS, warmup_rounds=1)
    end()


def test_first_answer_of_a_program(benchmark, model: Path) -> None:
    """`LLM(...)` in a fresh interpreter, which also ends its engine: what `perf.peers` measures, and the end."""
    program = (
        "import sys; from vnext import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], threads=int(sys.argv[2]), log='off') as llm:\n"
        f"    llm.generate([{PROMPT}], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)\n"
        "    print('first', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(model), str(THREADS)]
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
    """What is held after one answer and after a load; the time is that of the load."""
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
