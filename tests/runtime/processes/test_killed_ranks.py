"""Ranks of a launched engine that are killed, hang or are poisoned: its clients get the tokens of an undisturbed engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from fake_engine import wait_until
from llguidance import LLMatcher
from saved_adapters import DEMO, save_adapter
from test_launch import has_torch, running

from tests.e2e.serving import in_background
from tests.run.stops import Stops, stops  # noqa: F401  (a fixture)
from tests.runtime.killed import Heard, heard_of, wait_until_gone
from vnext.kernels.cpu import native
from vnext.models.config.adapter_config import adapter_digest
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.engine import process as core_process
from vnext.runtime.processes.determinism import process_environment
from vnext.runtime.processes.launch import RunningEngine
from vnext.runtime.processes.run_dir import RunDir
from vnext.runtime.processes.subprocesses import Child, start_child
from vnext.runtime.protocol.messages import AdapterFiles, EngineStats, SubmitRequest
from vnext.runtime.protocol.settings import CoreSettings, EngineSettings
from vnext.state.events import EngineRecovered, MemoryRanShort, pack_tokens
from vnext.state.params import Constraint, Sampling

LENGTH = 60
POISON = 2718
HANG = 2719
KINDS = (
    {},
    {"temperature": 0.0},
    {"constraint": Constraint(grammar=LLMatcher.grammar_from_regex("[a-z ]{30,40}")), "ignore_eos": False},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"prompt_logprobs": 1},
    {"temperature": 0.0, "logprobs": 0},
    {"top_k": 20, "min_p": 0.02, "logit_bias": ((7, 2.0),), "min_tokens": 9, "ignore_eos": False},
)
Kill = Callable[[], None]
FIRST = 2
"""Messages to the ranks up to the second step."""
QUICK = 2
"""So many of them import nothing into a rank: a step that does takes a second, and a rank hangs after thirty times the longest."""


def mixed(adapters: Sequence[AdapterFiles] = (), count: int = 16, length: int = LENGTH) -> list[SubmitRequest]:
    """Greedy and seeded requests with constraints, log-probabilities, penalties, scores of prompts and adapters."""
    made = []
    for number in range(count):
        fields = {"seed": number, "max_tokens": length, "temperature": 0.8, "ignore_eos": True, **KINDS[number % len(KINDS)]}
        prompt = pack_tokens([10 + number, 11, 12] * (1 + number))
        adapter = adapters[number // 3] if number % 3 == 0 and number // 3 < len(adapters) else None
        made.append(SubmitRequest(name=f"r{number}", prompt=prompt, sampling=Sampling(**fields), adapter=adapter))
    return made


def told(heard: Heard) -> dict[str, tuple[object, ...]]:
    """What a request's client makes of its outputs; parts of the prompt's scores may come again, with the same bits."""
    return {
        name: (
            b"".join(output.tokens for output in outputs),
            [score for output in outputs for score in output.logprobs],
            {part.first: (part.logprobs, part.ranks, part.top_tokens, part.top_logprobs) for each in outputs for part in each.prompt},
            [(output.finish, output.error) for output in outputs if output.finish],
        )
        for name, outputs in heard.items()
    }


def ranks_of(pid: int) -> list[psutil.Process]:
    return sorted(psutil.Process(pid).children(), key=psutil.Process.create_time)


def kill_last(pid: int) -> None:
    os.kill(ranks_of(pid)[-1].pid, signal.SIGKILL)


def heard_while_killed(
    stops: Stops, engine: RunningEngine, client: SyncEngineClient, asked: list[SubmitRequest], kills: Sequence[Kill]  # noqa: F811
) -> Heard:
    """What the clients hear. Each kill comes while the engine core has stopped in mid stream: the first one in the prompts, the others
    when ranks have come in the place of those before and compute."""
    stops.ask(FIRST)
    thread, heard = in_background(lambda: heard_of(client.run(asked)))
    for number, kill in enumerate(kills, 1):
        with stops.stopped(engine.child.pid):
            if number < len(kills):
                stops.ask()
            before = ranks_of(engine.child.pid)
            kill()
    wait_until(lambda: any(rank not in before for rank in ranks_of(engine.child.pid)))
    kill_last(engine.child.pid)  # while they start
    thread.join()
    return heard[0]


def lost_under_streams(log_dir: str) -> int:
    """How often the ranks were lost while requests ran."""
    states = (item for item in fold(open_log(Path(log_dir))) if isinstance(item, Folded))
    return sum(isinstance(each.event, EngineRecovered) and bool(each.after.requests) for each in states)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFiles]:
    folders = [save_adapter(DEMO, tmp_path_factory.mktemp("adapters") / str(seed), seed=seed) for seed in range(3)]
    return [AdapterFiles(name=f"a{at}", digest=adapter_digest(each), path=str(each)) for at, each in enumerate(folders)]


LORA = {"enable_lora": True, "max_loras": 2}


@pytest.mark.parametrize(("size", "log"), [(1, "full"), (2, "shape")])
def test_streams_outlive_killed_ranks_with_the_same_bits(
    tmp_path: Path, adapters: list[AdapterFiles], size: int, log: str, stops: Stops  # noqa: F811
) -> None:
    """Killed in prompts, in answers, and while other ranks start in their place."""
    with running(tmp_path / "undisturbed", tensor_parallel_size=size, **LORA) as (_, client):
        undisturbed = told(heard_of(client.run(mixed(adapters))))
    files = os.listdir("/dev/shm")
    with running(tmp_path / "killed", tensor_parallel_size=size, log=log, **LORA) as (engine, client):
        pid = engine.child.pid
        found = told(heard_while_killed(stops, engine, client, mixed(adapters), [partial(kill_last, pid)] * 3))
        wait_until(lambda: (client.stats.recoveries, client.stats.recovering) == (3, ""))
        assert client.stats.recovery_seconds > 0
        ranks = ranks_of(pid)
        assert len(ranks) == size
    assert found == undisturbed
    assert engine.stop() == 0 and not any(rank.is_running() for rank in ranks)
    assert replay(["verify", "--laws", engine.log_dir]) == 0 and lost_under_streams(engine.log_dir) == 3
    wait_until_gone(files)


def test_streams_outlive_killed_stages_with_the_bits_of_one_process(tmp_path: Path, stops: Stops) -> None:  # noqa: F811
    """The first stage is killed in prompts and in answers, the last one in answers and while others start."""
    with running(tmp_path / "one", log="off") as (_, client):
        expected = told(heard_of(client.run(mixed())))
    with running(tmp_path / "two", pipeline_parallel_size=2) as (engine, client):
        pid = engine.child.pid
        first, last = (lambda at=at: os.kill(ranks_of(pid)[at].pid, signal.SIGKILL) for at in (1, 0))
        assert told(heard_while_killed(stops, engine, client, mixed(), [first, first, last])) == expected
        wait_until(lambda: client.stats.recoveries == 3)
    assert engine.stop() == 0
    assert replay(["verify", "--laws", engine.log_dir]) == 0 and lost_under_streams(engine.log_dir) == 3


def test_an_idle_engine_whose_rank_dies_serves_the_next_request(tmp_path: Path) -> None:
    with running(tmp_path, log="off") as (engine, client):
        first = told(heard_of(client.run(mixed(count=len(KINDS)))))
        kill_last(engine.child.pid)
        assert told(heard_of(client.run(mixed(count=len(KINDS))))) == first
        assert not native.is_built() or not any(has_torch(rank.pid) for rank in ranks_of(engine.child.pid)), "no kind of request needs torch"
    assert engine.stop() == 0


def test_a_signal_ends_an_engine_whose_ranks_start_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stops: Stops  # noqa: F811
) -> None:
    with running(tmp_path) as (engine, client):
        outputs = client.run(mixed(count=4))
        old = ranks_of(engine.child.pid)
        stops.ask()
        begun = in_background(lambda: next(outputs))
        with stops.stopped(engine.child.pid):
            kill_last(engine.child.pid)
        begun[0].join()
        wait_until(lambda: any(rank not in old for rank in ranks_of(engine.child.pid)))
        new = ranks_of(engine.child.pid)
        assert engine.stop() == 0
        assert not any(rank.is_running() for rank in new)
        assert [output.finish for output in outputs if output.finish] == ["abort"] * 4
    assert replay(["verify", engine.log_dir]) == 0 and "Traceback" not in capfd.readouterr().err


def test_ranks_that_die_in_a_row_end_the_engine_with_the_log(tmp_path: Path) -> None:
    """Whatever starts is killed at once."""
    with running(tmp_path, max_restarts=2) as (engine, client):
        outputs = client.run(mixed(count=2))
        next(outputs)
        stop = threading.Event()

        def killer() -> None:
            while not stop.wait(0.02) and engine.child.wait(0) is None:
                with suppress(psutil.NoSuchProcess):
                    for rank in ranks_of(engine.child.pid):
                        rank.kill()

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            with pytest.raises(EngineDead, match=r"killed by SIGKILL[\s\S]*started again 2 times in a row[\s\S]*log that led to it"):
                list(outputs)
        finally:
            stop.set()
            thread.join()
        assert engine.child.wait(60) == 1
    assert replay(["verify", engine.log_dir]) == 0


def test_a_stopped_rank_is_replaced_and_said_to_be_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, step_timeout_s=8.0) as (engine, client):
        first = told(heard_of(client.run(mixed(count=QUICK))))
        (rank,) = ranks_of(engine.child.pid)
        found = told(heard_of(client.run(mixed(count=QUICK)), {50: lambda: os.kill(rank.pid, signal.SIGSTOP)}))
        assert found == first and not rank.is_running()
        wait_until(lambda: client.stats.recoveries == 1)
        assert client.trouble is None
    said = capfd.readouterr().err
    assert f"rank 0 (process {rank.pid}) is stopped by a signal" in said and "Rank 0 could not write its stack" in said


# ---- ranks that a test has spoilt --------------------------------------------------------------------------------


@contextmanager
def engine_of_spoilt_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str = "spoilt_rank", **settings: object
) -> Iterator[SyncEngineClient]:
    """An engine core as a thread here, whose ranks are the processes of spoilt_rank.py, or of another module."""
    run_dir = RunDir()
    engine = EngineSettings(**{"dtype": "float32", "threads": 1, "digest_interval": 1, "log": "full", **settings})
    core = CoreSettings(
        engine=engine, model_path=str(DEMO), address=f"ipc://{run_dir.path}/engine", run_dir=str(run_dir.path),
        log_dir=str(tmp_path / "log"),
    )  # fmt: skip
    folder = str(Path(__file__).resolve().parents[1])
    environment = {**process_environment(1), "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}

    def ranks(engine: EngineSettings) -> list[Child]:
        return [start_child(f"rank {rank}", module, environment=environment) for rank in range(engine.tensor_parallel_size)]

    monkeypatch.setattr(core_process, "start_ranks", ranks)
    wake, waker = socket.socketpair()
    thread = threading.Thread(target=core_process.run_until, args=(wake, core, ranks(engine)))
    thread.start()
    try:
        with SyncEngineClient.connect(core.address) as client:
            yield client
    finally:
        waker.send(b"e")
        thread.join(60)
        run_dir.remove()
    assert not thread.is_alive()


def test_a_request_that_kills_its_ranks_is_ended_with_a_sentence_and_the_others_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = SubmitRequest(name="p", prompt=pack_tokens([5, POISON, 6]), sampling=Sampling(seed=1, max_tokens=LENGTH))
    with engine_of_spoilt_ranks(tmp_path, monkeypatch) as client:
        first = told(heard_of(client.run(mixed(count=6))))
        found = told(heard_of(client.run([*mixed(count=6), poison])))
        stats: EngineStats | None = client.stats
    tokens, _, _, [(finish, error)] = found.pop("p")
    assert found == first
    assert (tokens, finish) == (b"", "abort") and 2 <= stats.recoveries <= 4
    assert re.fullmatch(
        r"the engine's ranks were lost twice in a row while they computed this request, so it was ended: "
        r"rank 0 was killed by SIGKILL \(.*\)",
        error,
    )
    assert replay(["verify", "--laws", str(tmp_path / "log")]) == 0


def test_the_stack_of_a_rank_that_hangs_lies_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It computes for ever, with a file that makes the next one not do so."""
    once = tmp_path / "hung"
    monkeypatch.setenv("HANG_ONCE", str(once))
    hang = SubmitRequest(name="h", prompt=pack_tokens([5, HANG, 6]), sampling=Sampling(seed=1, max_tokens=LENGTH, ignore_eos=True))
    with engine_of_spoilt_ranks(tmp_path, monkeypatch, step_timeout_s=8.0) as client:
        first = told(heard_of(client.run(mixed(count=QUICK))))
        found = told(heard_of(client.run([*mixed(count=QUICK), hang])))
        wait_until(lambda: client.stats.recoveries == 1)
    assert len(found.pop("h")[0]) == 4 * LENGTH and found == first and once.exists()
    (stack,) = (tmp_path / "log").glob("stacks-of-rank-0-at-step-*.txt")
    assert re.search(r"most recent call first\):\n[\s\S]*in hang\b[\s\S]*in launch", stack.read_text())
    assert str(stack) in caplog.text
    assert replay(["verify", "--laws", str(tmp_path / "log")]) == 0


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_ranks_that_lack_memory_give_the_step_up_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, rank: int
) -> None:
    """One of them lacks it, before, behind and amid a step; no process ends."""
    monkeypatch.setenv("SHORT_RANK", str(rank))
    found = []
    for count in (0, 8):
        monkeypatch.setenv("SHORT_COUNT", str(count))
        with engine_of_spoilt_ranks(tmp_path / str(count), monkeypatch, "short_rank", tensor_parallel_size=size) as client:
            found.append(told(heard_of(client.run(mixed(count=4)))))
            wait_until(lambda: client.stats.finished == 4)
            stats = client.stats
    assert found[0] == found[1] and stats.recoveries == 0
    events = [event for item in open_log(tmp_path / "8" / "log").items() for event in getattr(item, "events", ())]
    causes = {event.cause for event in events if isinstance(event, MemoryRanShort)}
    assert len([event for event in events if isinstance(event, MemoryRanShort)]) == stats.shortages == (8 if size > 1 else 5)
    assert causes == {f"rank {rank} lacks memory" + (" (Unable to allocate 3 GiB)" if rank == 0 else "")}
    assert replay(["verify", "--laws", str(tmp_path / "8" / "log")]) == 0
