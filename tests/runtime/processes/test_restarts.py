"""Engine cores that follow others: how often, how soon, and a request that kills each of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from fake_engine import wait_until

from tests.run.stops import Stops, stops  # noqa: F401  (a fixture)
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.processes.launch import DEMO_MODEL, start_engine
from vnext.runtime.processes.run_dir import READY, CoreNotes
from vnext.runtime.processes.supervisor import Restarts
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.settings import EngineSettings
from vnext.runtime.record.held import frames_held
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling

POLICY = """
import os, signal

from vnext.sched.policies import Candidate

def key(candidate: Candidate) -> tuple[int, ...]:
    if candidate.prompt_length == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return (candidate.id,)
"""


def request(name: str, length: int, max_tokens: int = 60) -> SubmitRequest:
    sampling = Sampling(seed=3, max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    return SubmitRequest(name=name, prompt=pack_tokens(list(range(5, 5 + length))), sampling=sampling)


def test_the_wait_grows_while_nothing_progresses_and_ends() -> None:
    restarts = Restarts(9)
    waits = [restarts.wait_s(has_progressed=False) for _ in range(10)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, None]
    restarts = Restarts(2)
    assert [restarts.wait_s(has_progressed=place % 2 == 0) for place in range(6)] == [0.0, 0.1] * 3
    assert Restarts(0).wait_s(has_progressed=True) is None


def test_notes_are_there_until_they_are_erased(tmp_path: Path) -> None:
    notes = CoreNotes(tmp_path)
    assert notes.text(READY) is None and notes.age_s(READY) == 0.0
    notes.write(READY, "yes")
    os.utime(tmp_path / READY, (time.time() - 7, time.time() - 7))
    assert notes.text(READY) == "yes" and 6.9 < notes.age_s(READY) < 60
    notes.erase(READY)
    notes.erase(READY)
    assert notes.text(READY) is None
    CoreNotes("").write(READY)
    CoreNotes(tmp_path / "none").write(READY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("executor", ["mp", "inproc"])
def test_a_request_that_kills_every_engine_core_is_found_and_the_others_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """It kills the core as soon as the scheduler looks at it."""
    (tmp_path / "killing_policy.py").write_text(POLICY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    settings = EngineSettings(
        log="off", threads=1, dtype="float32", scheduling_policy="killing_policy:key", executor=executor, max_restarts=4
    )
    requests = [request(f"r{length}", length) for length in (5, 6, 7)]
    engine = start_engine(settings, DEMO_MODEL).wait()
    try:
        with SyncEngineClient.connect(engine.address) as client:
            expected = {output.name: output.tokens for output in client.run(requests, whole=True)}
            outputs = list(client.run([requests[0], request("poison", 13), *requests[1:]], whole=True))
            found = {name: b"".join(output.tokens for output in outputs if output.name == name) for name in expected}
            assert found == expected
            [poison] = [output for output in outputs if output.name == "poison"]
            assert poison.finish == "abort" and "it is not tried again" in poison.error
            assert client._client.recoveries == 3
            assert [output.name for output in client.run([request("later", 4)], whole=True)] == ["later"]
    finally:
        engine.stop()


def test_a_core_that_is_idle_for_a_while_may_be_killed_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.runtime.processes.supervisor.WELL_S", 0.0)
    settings = EngineSettings(log_dir=str(tmp_path), threads=1, dtype="float32", max_restarts=1)
    engine = start_engine(settings, DEMO_MODEL).wait()
    try:
        with SyncEngineClient.connect(engine.address) as client:
            for count in (1, 2, 3):
                os.kill(engine.child.pid, signal.SIGKILL)
                wait_until(lambda: client._client.recoveries == count)  # noqa: B023  called in this turn only
            [output] = client.run([request("a", 4, 7)], whole=True)
            assert len(unpack_tokens(output.tokens)) == 7
            folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
            assert len(folders) == 4 and engine.log_dir == str(folders[-1])
            assert frames_held(engine.log_dir) >= 7 and frames_held(tmp_path / "none") == frames_held("") == 0
    finally:
        assert engine.stop() == 0


def test_an_engine_core_that_refuses_its_start_is_not_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stops: Stops  # noqa: F811
) -> None:
    """The log is required, its folder is gone, and a file has its name."""
    logs = tmp_path / "logs"
    engine = start_engine(EngineSettings(log_dir=str(logs), log_required=True, threads=1, dtype="float32"), DEMO_MODEL).wait()
    try:
        with SyncEngineClient.connect(engine.address) as client:
            refused = pytest.raises(EngineDead, match="the log directory .* cannot be written")
            with refused, stops.mid_stream(engine, client, [request("a", 4)]):
                logs.rename(tmp_path / "moved")
                logs.write_text("")
                os.kill(engine.child.pid, signal.SIGKILL)
    finally:
        engine.stop()
    assert caplog.text.count("and is started again") == 1
