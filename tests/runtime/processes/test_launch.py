"""A launched engine over the demo model: starts, answers, ends; failures of every process are one clear sentence."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from fake_engine import wait_until
from llguidance import LLMatcher
from msgspec.structs import replace

from tests.run.stops import Stops, stops  # noqa: F401  (a fixture)
from vnext import LLM
from vnext.base.exits import DONE, FAILED
from vnext.kernels.cpu import native
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.engine.process import run_until
from vnext.runtime.processes import launch
from vnext.runtime.processes.launch import DEMO_MODEL, RunningEngine, StartFailed, StartRefused, find_model, start_engine
from vnext.runtime.processes.rank_processes import CORE, start_core
from vnext.runtime.processes.run_dir import REFUSAL
from vnext.runtime.processes.subprocesses import start_child
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.runtime.protocol.settings import CoreSettings, EngineSettings
from vnext.runtime.transport.ring.writer import RingWriter
from vnext.state.events import pack_tokens
from vnext.state.params import Constraint, Sampling

GONE_TIMEOUT_S = 60


def launch_engine(settings: EngineSettings) -> RunningEngine:
    return start_engine(settings, find_model(settings)).wait()


@contextmanager
def running(log_dir: Path, **settings: object) -> Iterator[tuple[RunningEngine, SyncEngineClient]]:
    engine = launch_engine(
        EngineSettings(**{"dtype": "float32", "log_dir": str(log_dir), "threads": 1, "digest_interval": 1, **settings})
    )
    try:
        with SyncEngineClient.connect(engine.address) as client:
            yield engine, client
    finally:
        engine.stop()


def requests(count: int, max_tokens: int) -> list[SubmitRequest]:
    sampling = Sampling(seed=3, max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    return [
        SubmitRequest(name=f"r{index}", prompt=pack_tokens([10 + index, 11, 12]), sampling=sampling)
        for index in range(count)
    ]


def lengths(outputs: list[RequestOutput]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for output in outputs:
        counts[output.name] = counts.get(output.name, 0) + len(output.tokens) // 4
    return counts


def has_torch(pid: int) -> bool:
    return any("libtorch" in mapped.path for mapped in psutil.Process(pid).memory_maps())


SAMPLING = Sampling(seed=3, max_tokens=2, ignore_eos=True)
SPECIAL: dict[str, dict[str, object]] = {
    "scores": {"logprobs": 1, "prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": ((7, 2.0),)},
    "a grammar": {"constraint": Constraint(grammar=LLMatcher.grammar_from_regex("[a-z ]{30,40}")), "ignore_eos": False},
    "a minimum": {"min_tokens": 2, "ignore_eos": False, "pooling": 1},
}


@pytest.mark.parametrize("executor", ["mp", "inproc"])
def test_an_engine_serves_and_ends_in_order(tmp_path: Path, executor: str) -> None:
    with running(tmp_path, executor=executor, log="full", check_laws=True) as (engine, client):
        processes = psutil.Process(engine.child.pid).children(recursive=True)
        assert len(processes) == (1 if executor == "mp" else 0)
        assert lengths(list(client.run(requests(5, 20)))) == {f"r{index}": 20 for index in range(5)}
        ranks = [process.pid for process in processes] or [engine.child.pid]
        asked = [replace(requests(1, 2)[0], name=name, sampling=replace(SAMPLING, **given)) for name, given in SPECIAL.items()]
        assert lengths(list(client.run(asked))) == dict.fromkeys(SPECIAL, 2)
        if native.is_built():
            assert not any(map(has_torch, (engine.child.pid, *ranks))), "single calls compute the demo model's steps"
        assert has_torch(os.getpid()), "it would be seen"
    assert engine.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=GONE_TIMEOUT_S)
    assert not alive
    assert replay(["verify", "--laws", engine.log_dir]) == 0


def test_without_restarts_a_killed_rank_ends_the_engine_and_the_other_rank_with_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stops: Stops  # noqa: F811
) -> None:
    with running(tmp_path, tensor_parallel_size=2, max_restarts=0) as (engine, client):
        ranks = sorted(psutil.Process(engine.child.pid).children(), key=psutil.Process.create_time)
        died = pytest.raises(EngineDead, match=r"rank (1 was killed by SIGKILL|0 .*rank 1 has ended)[\s\S]*log")
        with died, stops.mid_stream(engine, client, requests(2, 60)):
            os.kill(ranks[1].pid, signal.SIGKILL)
        assert engine.child.wait(GONE_TIMEOUT_S) == 1
    said = capfd.readouterr().err
    assert "rank 0 stops: rank 1 has ended or left the group before all ranks had met\n" in said
    assert "RankLost" not in said


def test_a_stopped_rank_is_named_may_go_on_and_ends_the_engine_in_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stops: Stops  # noqa: F811
) -> None:
    with running(tmp_path, tensor_parallel_size=2, step_timeout_s=8.0, max_restarts=0) as (engine, client):
        ranks = sorted(psutil.Process(engine.child.pid).children(), key=psutil.Process.create_time)
        assert lengths(list(client.run(requests(2, 20)))) == {"r0": 20, "r1": 20}
        stopped = rf"step \d+ has had no result for \d+ s: rank 1 \(process {ranks[1].pid}\) is stopped by a signal"
        with stops.mid_stream(engine, client, requests(2, 300)) as outputs:
            os.kill(ranks[1].pid, signal.SIGSTOP)
            os.kill(engine.child.pid, signal.SIGCONT)
            wait_until(lambda: client.trouble is not None)
            assert re.fullmatch(rf"The engine is stalled: {stopped}\.", client.trouble)
            os.kill(ranks[1].pid, signal.SIGCONT)
        assert lengths(outputs) == {"r0": 300, "r1": 300}
        wait_until(lambda: client.trouble is None)
        ended = pytest.raises(EngineDead, match=rf"The engine stopped: {stopped}\. The log that led to it is in {tmp_path}")
        with ended, stops.mid_stream(engine, client, requests(2, 60)):
            os.kill(ranks[1].pid, signal.SIGSTOP)
        assert engine.child.wait(GONE_TIMEOUT_S) == 1
        assert not any(rank.is_running() for rank in ranks)
    said = capfd.readouterr().err
    assert "The ranks go on." in said and "ERROR root: the engine stopped: step" in said and "Traceback" not in said
    assert replay(["verify", "--laws", engine.log_dir]) == 0


def test_an_engine_whose_log_is_required_ends_when_its_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stops: Stops  # noqa: F811
) -> None:
    """The system lets no file of the engine core grow beyond some bytes from its first steps on."""
    with running(tmp_path, log_required=True, log="full") as (engine, client):
        ended = pytest.raises(EngineDead, match=r"The engine stopped: the log cannot be written \(.*\), and --log-required is on")
        with ended, stops.mid_stream(engine, client, requests(2, 900)) as reported:
            size = sum(path.stat().st_size for path in Path(engine.log_dir).glob("*.vnextlog")) + 2000
            resource.prlimit(engine.child.pid, resource.RLIMIT_FSIZE, (size, size))
        assert engine.child.wait(GONE_TIMEOUT_S) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert replay(["verify", "--laws", engine.log_dir]) == 0
    sampled = info(open_log(Path(engine.log_dir))).sampled_tokens
    assert 2 <= sum(lengths(reported).values()) <= sampled < 1800


def test_a_killed_engine_core_takes_its_ranks_along_and_leaves_a_log_that_verifies(tmp_path: Path, stops: Stops) -> None:  # noqa: F811
    with running(tmp_path, max_restarts=0) as (engine, client):
        ranks = psutil.Process(engine.child.pid).children()
        with pytest.raises(EngineDead), stops.mid_stream(engine, client, requests(2, 60)):
            os.kill(engine.child.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=GONE_TIMEOUT_S)
        assert not alive
    assert replay(["verify", "--laws", engine.log_dir]) == 0


def test_no_shared_memory_is_left_behind(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, _):
        assert not list(Path("/dev/shm").glob(f"vnext-ring-{engine.child.pid}-*"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"max_model_len": 10**6}, "1000000, more than"),
        ({"kv_cache_memory": 100}, "too small for one block"),
        ({"tensor_parallel_size": 3}, r"\b3\b"),
        ({"log_dir": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_a_start_that_cannot_work_is_one_sentence(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(StartFailed, match=words) as failure:
        launch_engine(EngineSettings(**{"log_dir": str(tmp_path), "threads": 1, **settings}))
    assert "Traceback" not in str(failure.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="--device is cuda, but .* use --device cpu$"):
        launch_engine(EngineSettings(device="cuda", log_dir=str(tmp_path), threads=1))
    with running(tmp_path, device="auto") as (engine, _):
        assert engine.ready.environment["device"] == "cpu"


def test_a_truncated_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(StartFailed, match="model.safetensors") as failure:
        launch_engine(EngineSettings(model=str(broken), log_dir=str(tmp_path / "logs"), threads=1))
    assert "Traceback" not in str(failure.value)


def test_a_machine_without_room_for_the_ring_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_room(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, "no room for a ring of 4194304 bytes: No space left on device; enlarge /dev/shm")

    monkeypatch.setattr(RingWriter, "create", no_room)
    settings = EngineSettings(threads=1, log="off")
    rank = start_child("rank 0", "vnext.runtime.rank.main", ["0"])
    reader, writer = socket.socketpair()
    core = CoreSettings(
        engine=settings, model_path=str(DEMO_MODEL), address=f"ipc://{tmp_path}/engine", run_dir=str(tmp_path), log_dir=""
    )
    with reader, writer:
        writer.send(b"!")  # nobody is there to hear of it
        assert run_until(reader, core, [rank]) == FAILED
    assert rank.process.poll() is not None
    assert (tmp_path / REFUSAL).read_text() == "no room for a ring of 4194304 bytes: No space left on device; enlarge /dev/shm"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_core_starts_its_ranks_before_it_has_settings_and_ends_them(how: signal.Signals) -> None:
    core = start_core("engine core", EngineSettings(threads=3, tensor_parallel_size=2))
    family = psutil.Process(core.pid)
    try:
        wait_until(lambda: len(family.children()) == 2)
        ranks = family.children()
        wait_until(lambda: all("vnext.runtime.rank.main" in rank.cmdline() for rank in ranks))
        assert [rank.environ()["OMP_NUM_THREADS"] for rank in ranks] == ["3", "3"]
    finally:
        core.process.send_signal(how)
    assert core.wait(GONE_TIMEOUT_S) == (DONE if how == signal.SIGTERM else -how)
    assert how == signal.SIGKILL or not any(rank.is_running() for rank in ranks), "it ends them itself, and waits for that"
    assert psutil.wait_procs(ranks, timeout=GONE_TIMEOUT_S)[1] == []
    core.terminate(0.0)


def test_a_program_s_core_imports_while_the_model_is_sought_and_ends_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[psutil.Process] = []

    def find(settings: EngineSettings) -> Path:
        seen.extend(each for each in psutil.Process().children() if CORE in each.cmdline())
        raise StartRefused("there is none")

    monkeypatch.setattr(launch, "find_model", find)
    with pytest.raises(StartRefused, match="there is none"):
        LLM("nothing", threads=1, data_parallel_size=2)
    assert len(seen) == 2 and not any(each.is_running() for each in seen)
