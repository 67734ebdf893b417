"""`vnext restart`: another engine takes over while clients wait, and their streams go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from serving import ROOT, Server, eventually, serving

from tests.run.stops import Stops
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.bench.load.client import COMPLETIONS, Client
from vnext.commands.restart import SIGNAL, changed, refusal
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.settings import EngineSettings
from vnext.state.events import EngineRecovered, RequestResumed

BODIES = [
    {"prompt": f"def f{place}(x):", "max_tokens": 200, "seed": place, "temperature": 0.8 * (place % 2), "ignore_eos": True, **more}
    for place, more in enumerate([{}, {}, {"logprobs": 1}, {"presence_penalty": 0.6}, {"n": 2, "ignore_eos": False}, {"best_of": 1}])
]
Tokens = dict[int, list[int]]
"""By the choice's index."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which servers are listed."""
    folder = tmp_path_factory.mktemp("state")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder)
    yield folder
    os.environ.pop("XDG_STATE_HOME")
    if before is not None:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Stops:
    return Stops(tmp_path_factory.mktemp("stops"))


@pytest.fixture(scope="module")
def server(state: Path, stops: Stops, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--threads", "1", "--dtype", "float32", "--log", "full", "--max-num-batched-tokens", "64")
    with serving(tmp_path_factory.mktemp("log"), *options, more=stops.environment) as running:
        yield running


def restart(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vnext.commands.cli", "restart", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)


async def answers(
    url: str, between: Callable[[], object] = lambda: None, holds: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Tokens]:
    """The tokens of each body's answers, all streamed at once; `between` is called in a thread once one has some, while `holds` keeps
    all of them from their ends."""
    begun = asyncio.Event()

    async def answer(client: Client, place: int) -> Tokens:
        tokens: Tokens = {}
        async for chunk in client.stream(COMPLETIONS, BODIES[place] | {"stream": True, "return_token_ids": True}):
            for choice in chunk.choices or ():
                tokens.setdefault(choice.index, []).extend(choice.token_ids or ())
            begun.set()
        return tokens

    async def interrupt() -> None:
        with ExitStack() as rest:
            await asyncio.to_thread(rest.enter_context, holds())
            await begun.wait()
            await asyncio.to_thread(between)

    async with Client(url, timeout_s=120) as client:
        found = await asyncio.gather(*(answer(client, place) for place in range(len(BODIES))), interrupt())
    return found[:-1]


def answers_beside(server: Server, stops: Stops, *words: str) -> tuple[list[Tokens], subprocess.CompletedProcess[str]]:
    """The answers in whose middle the server is restarted, and what that says."""
    said: list[subprocess.CompletedProcess[str]] = []
    stops.ask()
    found = asyncio.run(answers(server.url, lambda: said.append(restart(*words)), lambda: stops.held(server)))
    return found, said[0]


def test_streams_go_on_with_the_same_tokens_and_the_next_log_says_so(server: Server, stops: Stops) -> None:
    alone = asyncio.run(answers(server.url))
    before = server.process_of("vnext.runtime.engine.main").pid

    found, said = answers_beside(server, stops, "--max-num-batched-tokens", "48")

    assert said.returncode == 0, said.stderr
    assert "is replaced" in said.stdout
    assert server.process_of("vnext.runtime.engine.main").pid != before
    assert found == alone
    logs = sorted(server.log_dir.parent.iterdir())
    newest = open_log(logs[-1])
    events = [item.event for item in fold(newest) if isinstance(item, Folded)]
    recovered = next(event for event in events if isinstance(event, EngineRecovered))
    assert "replaced by its operator" in recovered.cause and Path(recovered.log) in logs and recovered.frames > 0
    assert any(isinstance(event, RequestResumed) and event.generated for event in events)
    for each in logs[-2:]:
        assert replay(["verify", str(each)]) == 0


def test_streams_go_on_with_another_number_of_ranks(server: Server, stops: Stops) -> None:
    """In bfloat16, where another order of sums is soon another text."""
    assert restart("--dtype", "bfloat16").returncode == 0
    alone = asyncio.run(answers(server.url))
    for ranks in ("2", "1"):
        found, said = answers_beside(server, stops, "--tensor-parallel-size", ranks)
        assert said.returncode == 0, said.stderr
        assert found == alone, f"{ranks} ranks"
    assert restart("--dtype", "float32").returncode == 0


def test_an_engine_that_cannot_start_changes_nothing(server: Server, stops: Stops) -> None:
    alone = asyncio.run(answers(server.url))
    found, said = answers_beside(server, stops, "--kv-cache-memory", "1k")
    assert said.returncode == 2 and "too small for one block" in said.stderr and "goes on as before" in said.stderr
    assert found == alone


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-model-len", "100"], "max_model_len cannot change"),
        (["/nowhere/at/all"], "there is no folder"),
        (["--port", "1"], "which server?"),
        (["--thread", "2"], "did you mean --threads"),
        (["--threads", "0.5"], "--threads"),
    ],
)
def test_what_cannot_be_is_one_sentence(server: Server, words: list[str], sentence: str) -> None:
    said = restart(*words)
    assert said.returncode == 2 and sentence in said.stderr and "Traceback" not in said.stderr


def test_a_signal_reads_the_command_line_again(server: Server) -> None:
    before = server.process_of("vnext.runtime.engine.main").pid
    os.kill(server.process.pid, SIGNAL)

    def is_replaced() -> bool:
        with suppress(psutil.Error, StopIteration):  # one that is ending
            return server.process_of("vnext.runtime.engine.main").pid != before
        return False

    assert eventually(is_replaced)
    assert len(asyncio.run(answers(server.url))) == len(BODIES)


def test_another_model_takes_over(server: Server, tmp_path: Path) -> None:
    """The same tokenizer and template, other weights: here a copy with another vector of a norm."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "tuned"
    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    tensors[name] = tensors[name] * torch.linspace(0.5, 1.5, len(tensors[name])).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    before = fingerprint(server)
    said = restart(str(folder))
    assert said.returncode == 0, said.stderr
    assert fingerprint(server) != before
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    said = restart(str(folder))
    assert said.returncode == 2 and "another tokenizer" in said.stderr


def fingerprint(server: Server) -> str:
    return BlockingClient(server.url).ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, dict)["system_fingerprint"]


def test_settings_change_one_by_one() -> None:
    before = EngineSettings(model=str(DEMO_MODEL), threads=2)
    after = changed(before, {"threads": 1, "dtype": "float32"})
    assert (after.threads, after.dtype, after.model) == (1, "float32", before.model)
    assert refusal(before, after, DEMO_MODEL, DEMO_MODEL) == ""
    assert "max_restarts" in refusal(before, changed(before, {"max_restarts": 3}), DEMO_MODEL, DEMO_MODEL)
    for name, value in {"role": "prefill", "prefill_engines": 1, "encode_engines": 1}.items():
        other = EngineSettings(data_parallel_size=3, **{name: value})
        assert name in refusal(EngineSettings(data_parallel_size=3), other, DEMO_MODEL, DEMO_MODEL)
    never = EngineSettings(max_restarts=0)
    assert "--max-restarts is 0" in refusal(never, never, DEMO_MODEL, DEMO_MODEL)


def test_servers_that_have_ended_are_not_listed(state: Path, tmp_path: Path) -> None:
    with serving(tmp_path, "--threads", "1") as second:
        files = {json.loads(file.read_text())["url"]: file for file in (state / "vnext" / "servers").glob("*.json")}
        assert second.url in files and files[second.url].stat().st_mode & 0o077 == 0
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        time.sleep(0.1)
        said = restart("--port", second.url.rpartition(":")[2])
        assert said.returncode == 2 and second.url not in said.stderr
