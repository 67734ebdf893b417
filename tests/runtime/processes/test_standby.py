"""Processes that stand by: they take the place of others that end, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_restarts import request

from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.processes import standby as standby_module
from vnext.runtime.processes.launch import DEMO_MODEL, RunningEngine, start_engine
from vnext.runtime.processes.standby import Standby
from vnext.runtime.processes.subprocesses import Child, start_child, terminate_all
from vnext.runtime.protocol.settings import EngineSettings

CORE, RANK = "vnext.runtime.engine.main", "vnext.runtime.rank.main"


WAIT_S = 60.0
"""In the engine core's own process ranks stand by only after ten seconds."""


def wait_until(condition: Callable[[], bool], otherwise: Callable[[], object] = lambda: "it never comes true") -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.02)


def waiting(module: str) -> list[psutil.Process]:
    """The processes of this program that stand by."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[-2:] == [module, "standby"] and process.name() == "vnext-standby":
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def family() -> set[psutil.Process]:
    """The engine cores and ranks below this process; other tests' programs may start processes of their own meanwhile."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if {CORE, RANK} & set(process.cmdline()):
                found.add(process)
    return found


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    monkeypatch.setattr(standby_module, "AFTER_S", 0.0)
    before = family()
    settings = EngineSettings(log_dir=str(tmp_path), threads=1, dtype="float32", standby=True, tensor_parallel_size=2)
    running = start_engine(settings, DEMO_MODEL).wait()
    yield running
    assert running.stop() == 0
    wait_until(lambda: family() <= before, lambda: f"{family() - before} are left")


def test_a_core_that_stands_by_follows_one_that_is_killed_with_the_ranks_that_it_has(engine: RunningEngine) -> None:
    with SyncEngineClient.connect(engine.address) as client:
        [expected] = client.run([request("a", 4, 40)], whole=True)
        for count in (1, 2):
            wait_until(lambda: len(waiting(CORE)) == 1 and len(waiting(CORE)[0].children()) == 2)
            [next_one] = waiting(CORE)
            ranks = {rank.pid for rank in next_one.children()}
            os.kill(engine.child.pid, signal.SIGKILL)
            wait_until(lambda: client._client.recoveries == count)  # noqa: B023  called in this turn only
            assert engine.child.pid == next_one.pid and ranks <= {each.pid for each in next_one.children()}
            [output] = client.run([request(f"b{count}", 4, 40)], whole=True)
            assert output.tokens == expected.tokens


def test_ranks_that_stand_by_follow_one_that_is_killed(engine: RunningEngine) -> None:
    with SyncEngineClient.connect(engine.address) as client:
        [expected] = client.run([request("a", 4, 40)], whole=True)
        core = psutil.Process(engine.child.pid)
        wait_until(lambda: len([each for each in waiting(RANK) if each.ppid() == core.pid]) == 2)
        ahead = {each.pid for each in waiting(RANK) if each.ppid() == core.pid}
        [first, *_] = [each for each in core.children() if each.pid not in ahead]
        first.kill()
        wait_until(lambda: ahead.isdisjoint({each.pid for each in waiting(RANK)}))
        [output] = client.run([request("b", 4, 40)], whole=True)
        assert output.tokens == expected.tokens and ahead <= {each.pid for each in core.children()}


def test_one_that_has_ended_is_not_waited_for(engine: RunningEngine) -> None:
    with SyncEngineClient.connect(engine.address) as client:
        wait_until(lambda: len(waiting(CORE)) == 1)
        waiting(CORE)[0].kill()
        os.kill(engine.child.pid, signal.SIGKILL)
        wait_until(lambda: client._client.recoveries == 1)
        [output] = client.run([request("a", 4, 7)], whole=True)
        assert len(output.tokens) == 28


def test_what_stands_by_is_of_one_set_and_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(standby_module, "AFTER_S", 0.01)
    made: list[Child] = []

    def start() -> list[Child]:
        made.append(start_child("rank 0", RANK, ("standby",)))
        return made[-1:]

    some = Standby(start)
    assert some.take() == []
    some.prepare()
    wait_until(lambda: len(made) == 1)
    assert some.take() == made and some.take() == []
    terminate_all(made, grace_s=0.0)
    some.prepare()
    wait_until(lambda: len(made) == 2)
    made[1].process.kill()
    made[1].wait(60)
    assert some.take() == [], "one that has ended is of no use"
    some.prepare()
    wait_until(lambda: len(made) == 3)
    some.close()
    assert made[2].process.poll() is not None
    some.prepare()
    time.sleep(0.1)
    assert len(made) == 3
