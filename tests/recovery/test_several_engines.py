"""Several engines and several API servers behind one port: the same texts as one engine, whatever is killed or replaced meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import ROOT, Server, complete_all, eventually, serving

from vnext import LLM, SamplingParams
from vnext.commands.bench.load.answers import RequestFailed
from vnext.commands.bench.load.client import COMPLETIONS, Client
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.state.events import RequestResumed

COMMON = ("--dtype", "float32", "--threads", "1", "--log", "full", "--max-num-seqs", "16", "--served-model-name", "demo")
CORE, RANK, API = "vnext.runtime.engine.main", "vnext.runtime.rank.main", "vnext.server"
BODIES = [
    {"prompt": f"def f{place}(x):", "max_tokens": 200, "seed": place, "temperature": 0.8 * (place % 2), "ignore_eos": True, **more}
    for place, more in zip(range(32), [{}, {}, {"logprobs": 1}, {"presence_penalty": 0.6}] * 8)
]
Tokens = list[int] | None


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Tokens]:
    """What one engine answers to each body."""
    with serving(tmp_path_factory.mktemp("alone"), *COMMON) as server:
        return asyncio.run(answers(server.url))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of its own in which servers are listed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def server(state: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("replicas")
    with serving(log, *COMMON, "--data-parallel-size", "2") as running:
        assert eventually(lambda: len(processes(running, API)) == 2)
        yield running
        assert running.stop() == 0
    logs = sorted(log.glob("engine-*/*"))
    assert {each.parent.name for each in logs} == {"engine-0", "engine-1"}
    assert [replay(["verify", "--laws", str(each)]) for each in logs if each.is_dir()] == [0] * sum(each.is_dir() for each in logs)


def processes(server: Server, module: str) -> list[psutil.Process]:
    found = []
    for process in server.processes[1:]:
        with suppress(psutil.Error):  # it has ended meanwhile
            found += [process] if module in process.cmdline() else []
    return sorted(found, key=lambda process: process.pid)


async def answers(url: str, between: Callable[[], object] | None = None, count: int = len(BODIES)) -> list[Tokens]:
    """The tokens of the answers to `count` bodies, all streamed at once; None where the connection was lost. `between` is called in
    a thread once half of them have some: sooner than those have ended, on a busy machine too."""
    begun = asyncio.Semaphore(0)

    async def answer(place: int) -> Tokens:
        tokens: list[int] = []
        try:
            async with Client(url, timeout_s=120) as client:  # a connection of its own
                async for chunk in client.stream(COMPLETIONS, BODIES[place] | {"stream": True, "return_token_ids": True}):
                    if not tokens:
                        begun.release()
                    tokens += chunk.token_ids
        except RequestFailed as error:
            assert error.kind == "broken", error
            return None
        return tokens

    async def interrupt() -> None:
        for _ in range(count // 2):
            await begun.acquire()
        if between is not None:
            await asyncio.to_thread(between)

    return (await asyncio.gather(*(answer(place) for place in range(count)), interrupt()))[:-1]


def up(server: Server) -> bool:
    return server.metric("vnext_engine_up") == 2 and server.metric("vnext_engine_stalled") == 0


def test_streams_are_those_of_one_engine_and_both_engines_answer(server: Server, alone: list[Tokens]) -> None:
    assert asyncio.run(answers(server.url)) == alone
    assert eventually(lambda: all(server.metric(rf'vnext_requests_arrived_total\{{[^}}]*engine="{each}"[^}}]*\}}') >= 8 for each in (0, 1)))


def test_a_prompt_goes_where_its_beginning_is_cached(server: Server) -> None:
    """Whichever API server is asked: each follows the events of both engines."""
    hits = server.metric("vnext_prefix_cache_hits_total")
    prompts = [[*range(place, place + 100)] for place in (100, 200, 250)]
    for prompt in prompts * 3:
        complete_all(server.url, [{"prompt": prompt, "max_tokens": 1}], 1)
    assert eventually(lambda: server.metric("vnext_prefix_cache_hits_total") == hits + 2 * 3 * 96)


@pytest.mark.parametrize(("module", "number"), [(RANK, 1), (CORE, 1)])
def test_no_stream_is_lost_when_a_process_of_an_engine_is_killed(
    server: Server, alone: list[Tokens], module: str, number: int
) -> None:
    assert eventually(lambda: up(server))
    recoveries = server.metric("vnext_recoveries_total")
    victim = processes(server, module)[number]
    assert asyncio.run(answers(server.url, lambda: os.kill(victim.pid, signal.SIGKILL))) == alone
    assert eventually(lambda: server.metric("vnext_recoveries_total") > recoveries and up(server))


def test_streams_of_a_killed_core_go_on_at_the_other_engine(server: Server, alone: list[Tokens]) -> None:
    """The logs say so: of the two engines it is the one without a new log that has resumed them."""
    assert eventually(lambda: up(server))
    victim, before = processes(server, CORE)[0], resumed(server)
    assert asyncio.run(answers(server.url, lambda: os.kill(victim.pid, signal.SIGKILL))) == alone
    assert eventually(lambda: up(server) and len(resumed(server)) > len(before))
    after = resumed(server)
    (new,) = after.keys() - before.keys()
    assert sum(count - before[log] for log, count in after.items() if log.parent != new.parent) > 0


def resumed(server: Server) -> dict[Path, int]:
    """By log of either engine, how many streams it went on with that had tokens already."""
    logs = (path for path in server.log_dir.parent.parent.glob("engine-*/*") if path.is_dir())
    return {log: sum(isinstance(each, RequestResumed) and bool(each.generated) for each in _events(log)) for log in logs}


def _events(log: Path) -> list[Any]:
    return [item.event for item in fold(open_log(log)) if isinstance(item, Folded)]


def test_a_killed_api_server_loses_its_own_sockets_only(server: Server, alone: list[Tokens]) -> None:
    assert eventually(lambda: len(processes(server, API)) == 2)
    victim = processes(server, API)[1]
    found = asyncio.run(answers(server.url, lambda: os.kill(victim.pid, signal.SIGKILL)))
    lost = [place for place, tokens in enumerate(found) if tokens is None]
    assert len(lost) < len(BODIES)
    assert [tokens for place, tokens in enumerate(found) if place not in lost] == [
        tokens for place, tokens in enumerate(alone) if place not in lost
    ]
    assert eventually(lambda: len(processes(server, API)) == 2)
    assert eventually(lambda: server.metric("vnext_num_requests_running") + server.metric("vnext_num_requests_waiting") == 0)
    assert asyncio.run(answers(server.url)) == alone


def test_engines_are_replaced_one_after_another_under_streams(server: Server, alone: list[Tokens]) -> None:
    before = {process.pid for process in processes(server, CORE)}
    said: list[subprocess.CompletedProcess[str]] = []

    def restart() -> None:
        command = [sys.executable, "-m", "vnext.commands.cli", "restart", "--max-num-batched-tokens", "512"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        said.append(subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120))

    assert asyncio.run(answers(server.url, restart)) == alone
    assert said[0].returncode == 0, said[0].stderr
    assert before.isdisjoint(process.pid for process in processes(server, CORE)) and len(processes(server, CORE)) == 2
    assert asyncio.run(answers(server.url)) == alone


def test_replicas_of_two_ranks(tmp_path: Path) -> None:
    options = (*COMMON, "--tensor-parallel-size", "2")
    with serving(tmp_path / "alone", *options) as one:
        alone = asyncio.run(answers(one.url, count=12))
    with serving(tmp_path / "two", *options, "--data-parallel-size", "2") as server:
        assert len(processes(server, RANK)) == 4
        victim = processes(server, CORE)[0]
        assert asyncio.run(answers(server.url, lambda: os.kill(victim.pid, signal.SIGKILL), 12)) == alone
        assert server.stop() == 0
        said = server.process.stderr.read()
    assert "engine core 0 was killed by SIGKILL" in said or "engine core 1 was killed by SIGKILL" in said


def test_the_engines_of_an_llm(tmp_path: Path) -> None:
    """Requests without a seed get the seeds of one engine; operations are for all engines."""
    params = [SamplingParams(max_tokens=20, temperature=0.9, n=1 + place % 2) for place in range(6)]
    settings: dict[str, Any] = {"seed": 3, "dtype": "float32", "threads": 1, "log_dir": str(tmp_path)}
    found = []
    for count in (1, 2):
        with LLM(data_parallel_size=count, **settings) as llm:
            outputs = llm.generate([f"def f{place}(x):" for place in range(6)], params, use_tqdm=False)
            found.append([[each.token_ids for each in output.outputs] for output in outputs])
            assert len(set(llm.collective_rpc("process_id"))) == len(llm.log_dirs) == count
            weights = llm.update_weights(str(Path(ROOT) / "vnext/demo_model"))
            assert weights["version"] == 1 and llm.residence.version == 1
            llm.sleep()
            llm.wake_up()
            again = llm.generate("def f0(x):", SamplingParams(max_tokens=5, temperature=0.0), use_tqdm=False)
            found[-1].append([again[0].outputs[0].token_ids])
    assert found[0] == found[1]
