"""Children: configuration over stdin, death noticed on both sides, orderly and forced ends, Ctrl-C kept away."""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vnext.runtime.processes import subprocesses
from vnext.runtime.processes.subprocesses import (
    CONFIG_BYTES_MAX,
    PARENT_DIED_EXIT_CODE,
    Child,
    ChildDied,
    check_alive,
    signals_held,
    start_child,
    terminate_all,
)

ROOT = Path(__file__).parents[3]
GRACE_S = 60.0

ENTER = "import os, sys\nfrom vnext.runtime.processes.subprocesses import *\nconfig = enter_child()\n"
PARENT = """
import sys
from vnext.runtime.processes.subprocesses import start_child
child = start_child("sleeper", "sleeper")
child.send_config(sys.argv[1].encode())
print(child.pid, flush=True)
child.wait()
"""

TRACER = """
import ctypes, os, sys
SEIZE, TRACE_EXIT = 0x4206, 0x40
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
failed = libc.ptrace(SEIZE, int(sys.argv[1]), None, TRACE_EXIT)
print(os.strerror(ctypes.get_errno()) if failed else "traced", flush=True)
sys.stdin.read()
"""

Starter = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Starter]:
    """Starts a child whose module has the given source; ends what is left."""
    started: list[Child] = []

    def start_source(source: str, name: str = "worker") -> Child:
        (tmp_path / f"{name}.py").write_text(source)
        started.append(start_child(name, name, environment=environment(tmp_path)))
        return started[-1]

    yield start_source
    terminate_all(started, grace_s=0)


class Signpost:
    """A named pipe on which a child tells that it has come to a certain point."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.reading = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # both ways, so that there is never an end of file

    def read(self, size_bytes: int) -> bytes:
        received = b""
        while len(received) < size_bytes:
            assert select.select([self.reading], [], [], GRACE_S)[0], "the child did not come to its point"
            received += os.read(self.reading, size_bytes - len(received))
        return received


@pytest.fixture
def signpost(tmp_path: Path) -> Iterator[Signpost]:
    post = Signpost(tmp_path / "signpost")
    yield post
    os.close(post.reading)


def environment(module_folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{module_folder}{os.pathsep}{ROOT}"}


def ready_source(path: str) -> str:
    """A child that tells through `path` that it has entered, then sleeps."""
    return ENTER + f"import time\nopen({path!r}, 'wb', 0).write(config)\ntime.sleep(60)\n"


def test_a_child_has_ended_while_another_thread_asks_for_its_return_code(start: Starter) -> None:
    """Popen lets one thread at a time ask the system, and says of an ended process that it runs to all others meanwhile."""
    child = start(ENTER + "sys.exit(3)\n")
    with child.process._waitpid_lock:
        child.send_config(b"")
        assert select.select([child.exit_fd], [], [], GRACE_S)[0]
        asked = threading.Timer(0.05, lambda: found.append(child.wait(GRACE_S)))
        found: list[int | None] = []
        asked.start()
        asked.join(0.3)
    asked.join(GRACE_S)
    assert found == [3]


@pytest.mark.parametrize("config", [b"", b"\x81\xa1a\x01", bytes(range(256)) * 2000], ids=["empty", "small", "large"])
def test_config_arrives_as_sent(start: Starter, config: bytes) -> None:
    child = start(ENTER + "import hashlib\nsys.stderr.write(f'{len(config)} {hashlib.sha256(config).hexdigest()}')\n")
    child.send_config(config)
    assert child.wait(GRACE_S) == 0
    with pytest.raises(ChildDied) as died:
        child.check_alive()
    assert died.value.last_lines == (f"{len(config)} {hashlib.sha256(config).hexdigest()}",)


def test_death_names_the_child_its_status_and_its_last_lines(start: Starter, capfd: pytest.CaptureFixture[str]) -> None:
    child = start(ENTER + "for i in range(100): print('line', i, file=sys.stderr)\nsys.exit(3)\n", name="rank_1")
    child.send_config(b"")
    assert child.wait(GRACE_S) == 3
    with pytest.raises(ChildDied, match="rank_1 ended with exit status 3") as died:
        check_alive([child])
    assert died.value.returncode == 3
    assert died.value.last_lines == tuple(f"line {number}" for number in range(80, 100))
    assert capfd.readouterr().err == "".join(f"line {number}\n" for number in range(100))  # passed through, too


def test_a_child_imports_no_module_of_the_working_directory(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    for name in ("queue", "vnext", "msgspec"):
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the working directory')\n")
    monkeypatch.chdir(folder)
    child = start("import queue, msgspec\n" + ENTER)
    child.send_config(b"")
    assert child.wait(GRACE_S) == 0


def test_every_python_that_the_product_starts_is_kept_from_the_working_directory() -> None:
    """`python -m` and `python -c` look there first."""
    sources = {path: path.read_text() for path in (ROOT / "vnext").rglob("*.py")}
    started = {str(path): re.findall(r"sys\.executable,\s+(\S+)", text) for path, text in sources.items()}
    assert sum(map(len, started.values())) >= 4
    assert {path: found for path, found in started.items() if {*found} - {'"-P",'}} == {}


def test_living_children_pass_the_check_and_exit_fd_tells_the_end(start: Starter, signpost: Signpost) -> None:
    child = start(ready_source(signpost.path))
    child.send_config(b"ready")
    assert signpost.read(5) == b"ready"
    check_alive([child])
    assert child.wait(0) is None
    if child.exit_fd is None:
        pytest.skip("no pidfd on this system")
    assert select.select([child.exit_fd], [], [], 0)[0] == []
    child.process.kill()
    assert select.select([child.exit_fd], [], [], GRACE_S)[0] == [child.exit_fd]
    with pytest.raises(ChildDied, match="SIGKILL.*out of memory"):
        check_alive([child])


def test_a_killed_child_that_the_system_holds_is_not_waited_for_for_ever(
    start: Starter, signpost: Signpost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does not complete the end of a traced process before its tracer has looked at it, as in a wait for a disk."""
    monkeypatch.setattr(subprocesses, "KILLED_TIMEOUT_S", 0.2)
    child = start(ready_source(signpost.path))
    child.send_config(b"ready")
    assert signpost.read(5) == b"ready"
    tracer = [sys.executable, "-c", TRACER, str(child.pid)]
    with subprocess.Popen(tracer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holding:
        if (refusal := holding.stdout.readline().strip()) != "traced":
            pytest.skip(f"this system does not let processes trace each other: {refusal}")
        assert child.terminate(0.0) == -signal.SIGKILL
        assert child.process.poll() is None, "the child has ended, so nothing held it"
        holding.kill()
    child.process.wait(GRACE_S)


def test_config_for_a_dead_child_tells_why_it_died(start: Starter) -> None:
    child = start("raise SystemExit('no such device')\n")
    assert child.wait(GRACE_S) == 1
    with pytest.raises(ChildDied, match="no such device"):
        child.send_config(bytes(2**20))


def test_config_over_the_bound_is_refused(start: Starter) -> None:
    child = start(ENTER)
    with pytest.raises(ValueError, match="over the bound"):
        child.send_config(bytes(CONFIG_BYTES_MAX + 1))


def test_terminate_is_gentle_then_forced_and_idempotent(start: Starter, signpost: Signpost) -> None:
    gentle = start(ready_source(signpost.path), name="gentle")
    gentle.send_config(b"g")
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf_source = ENTER + ignoring + ready_source(signpost.path).removeprefix(ENTER)
    deaf = start(deaf_source, name="deaf")
    deaf.send_config(b"d")
    assert set(signpost.read(2)) == set(b"gd")
    assert gentle.terminate(GRACE_S) == -signal.SIGTERM
    assert deaf.terminate(0.05) == -signal.SIGKILL
    assert terminate_all([gentle, deaf], grace_s=0) == {"gentle": -signal.SIGTERM, "deaf": -signal.SIGKILL}


def test_a_child_ends_by_sigterm_whatever_its_parent_does_with_that_signal(start: Starter, signpost: Signpost) -> None:
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = start(ready_source(signpost.path))
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    child.send_config(b"ready")
    assert signpost.read(5) == b"ready"
    assert child.terminate(grace_s=GRACE_S) == -signal.SIGTERM


def test_interrupt_does_not_reach_a_child_at_any_moment(start: Starter, signpost: Signpost) -> None:
    child = start(ready_source(signpost.path))
    child.process.send_signal(signal.SIGINT)  # its interpreter has not even started
    child.send_config(b"ready")
    assert signpost.read(5) == b"ready"
    child.process.send_signal(signal.SIGINT)
    assert child.terminate(GRACE_S) == -signal.SIGTERM


def test_starting_a_child_leaves_our_own_interrupt_alone(start: Starter) -> None:
    start("")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_closed_lifeline_ends_the_child(start: Starter, signpost: Signpost) -> None:
    child = start(ready_source(signpost.path))
    child.send_config(b"ready")
    assert signpost.read(5) == b"ready"
    child.process.stdin.close()
    assert child.wait(GRACE_S) == PARENT_DIED_EXIT_CODE


def test_child_of_a_killed_parent_ends(tmp_path: Path, signpost: Signpost) -> None:
    (tmp_path / "sleeper.py").write_text(ready_source(signpost.path))
    command = [sys.executable, "-c", PARENT, "ready"]
    parent = subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        child_pid = int(parent.stdout.readline())
        assert signpost.read(5) == b"ready"
        exit_fd = os.pidfd_open(child_pid)
    finally:
        parent.kill()
        parent.communicate()
    assert select.select([exit_fd], [], [], GRACE_S)[0] == [exit_fd]
    os.close(exit_fd)


@pytest.mark.parametrize(
    ("stdin", "words"), [(b"\x05", "EOFError.*has it died"), (b"typed by hand\n", "started by `vnext serve`")]
)
def test_child_started_by_hand_says_so(stdin: bytes, words: str) -> None:
    command = [sys.executable, "-c", ENTER]
    result = subprocess.run(command, cwd=ROOT, input=stdin, stderr=subprocess.PIPE, timeout=GRACE_S, check=False)
    assert result.returncode == 1
    assert re.search(words, result.stderr.decode())


def test_signals_come_when_what_was_begun_is_whole() -> None:
    """Also where another thread takes the signal, as one does that passes on what a child says."""
    done, over = [], threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            with signals_held():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("begun")
                done.append("whole")
            done.append("later")
    finally:
        over.set()
        other.join()
    assert done == ["begun", "whole"]
