"""Descriptors above 1,023, which `select` does not take: whoever waits for some takes them, and a process may have them."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from vnext.runtime.engine.process import leave_on_sigterm
from vnext.runtime.processes.inherited import FILES_MAX
from vnext.runtime.processes.readable import readable
from vnext.runtime.transport.ring.results import ResultsReceiver, ResultsSender

ROOT = Path(__file__).resolve().parents[3]
SELECT_MAX = 1023


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """All descriptors that `select` takes are in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * SELECT_MAX), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < SELECT_MAX:
        opened.append(os.dup(opened[0]))
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_can_be_read_and_what_has_ended_is_found() -> None:
    with ExitStack() as stack:
        quiet, told, left = ([stack.enter_context(each) for each in socket.socketpair()] for _ in range(3))
        told[1].send(b"!")
        left[1].close()
        assert min(quiet[0].fileno(), told[0].fileno()) > SELECT_MAX
        assert readable((quiet[0], told[0].fileno(), left[0]), None) == {told[0].fileno(), left[0].fileno()}
        assert readable((quiet[0],), 0.01) == readable((), 0) == set()
        closed = left[0].detach()
        os.close(closed)
        with pytest.raises(OSError, match="Bad file descriptor"):
            readable((quiet[0], closed), None)
        with pytest.raises(ValueError, match="negative"):
            readable((left[0],), None)


def test_ranks_results_arrive(tmp_path: Path) -> None:
    receiver = ResultsReceiver(str(tmp_path / "results"), 1)
    with ResultsSender(str(tmp_path / "results")) as sender:
        assert receiver.wait(60)
        sender.send(b"result")
        assert receiver.wait(60) and list(receiver.messages()) == [b"result"]
        assert receiver.sockets[0].fileno() > SELECT_MAX
    receiver.close()


def test_a_signal_that_came_before_a_start_ends_it() -> None:
    wake, waker = socket.socketpair()
    with wake, waker:
        with leave_on_sigterm(wake):
            pass
        waker.send(bytes([signal.SIGTERM]))
        with pytest.raises(SystemExit), leave_on_sigterm(wake):
            pytest.fail("it goes on")


def test_nothing_waits_by_select() -> None:
    """Of what a process of vnext may do with many descriptors; `select.poll` takes all."""
    select = re.compile(r"\bselect\.select\b|from select import.*\bselect\b|SelectSelector")
    assert [path for path in (ROOT / "vnext").rglob("*.py") if select.search(path.read_text())] == []


def test_a_program_raises_its_limit_of_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource as r; from vnext.runtime.processes.inherited import begin_process; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, hard)); begin_process(); print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    assert [int(each) for each in said] == [min(hard, FILES_MAX) if hard != resource.RLIM_INFINITY else FILES_MAX, hard]
