"""Subprocesses: starting, watching and ending child processes. Plain programs, no multiprocessing.

A child is `python -P -m module`: it imports no module of the working directory. Its stdin carries first the configuration (8
bytes of length, then the bytes) and then nothing: the pipe stays open as a lifeline, whose end tells the child that the parent
has died, however it died. The child's stderr passes through to ours, and its last lines are kept for the error. A child never
sees Ctrl-C: the parent decides when children end. Does not interpret the bytes.
Parent side: start_child, Child, check_alive, terminate_all. Child side: enter_child, or its three parts in this order.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vnext.runtime.processes.forks import keep_from_forks
from vnext.runtime.processes.readable import readable
from vnext.runtime.processes.spawn import KILLED_TIMEOUT_S, ignore_interrupts, spawn
from vnext.runtime.protocol.log_lines import STDERR, ChildLines

CONFIG_BYTES_MAX = 64 * 2**20
REAPED_TIMEOUT_S = 1.0  # of a process that has ended, which another thread may be asking for its return code just now
LAST_LINE_COUNT = 20
PARENT_DIED_EXIT_CODE = 86

_LENGTH = struct.Struct("<Q")
_TAIL_BYTES_MAX = 16 * 2**10
_STDERR_END_TIMEOUT_S = 1.0
_STDIN = 0


if TYPE_CHECKING:
    from vnext.runtime.processes.forked import Forked

    Process = subprocess.Popen[bytes] | Forked


class RankStartFailed(Exception):
    """A rank could not start: the rank's own sentence."""


class HostLost(RuntimeError):
    """A host of the engine, or its ranks, cannot be reached any more: one sentence."""


class ChildDied(Exception):
    """A child ended while it was needed. `returncode` is negative for a signal, as in subprocess; `how` is the error without the
    child's last lines."""

    def __init__(self, name: str, returncode: int, last_lines: Sequence[str]) -> None:
        self.name = name
        self.returncode = returncode
        self.last_lines = tuple(last_lines)
        words = "".join(f"\n    {line}" for line in self.last_lines) or " (nothing)"
        self.how = f"{name} {_describe_end(returncode)}"
        super().__init__(f"{self.how}; its last lines on stderr:{words}")


class _StderrTee:
    """Passes a child's stderr on to ours as it arrives and keeps its last lines. Owns its thread and the pipe, None once closed."""

    def __init__(self, pipe: int, name: str, pid: int) -> None:
        self.pipe: int | None = pipe
        self._lines = ChildLines(name, pid)
        self._tail = b""
        self._thread = threading.Thread(target=self._run, name=f"stderr of {name}", daemon=True)
        self._thread.start()

    def last_lines(self) -> tuple[str, ...]:
        """The last lines so far. After the child's end, these include all it wrote, unless a grandchild still holds the pipe."""
        self._thread.join(_STDERR_END_TIMEOUT_S)
        return tuple(self._tail.decode(errors="replace").splitlines()[-LAST_LINE_COUNT:])

    def _run(self) -> None:
        pipe = self.pipe
        assert pipe is not None, "it is closed here alone"
        while chunk := os.read(pipe, 65536):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES_MAX:]
            STDERR.pass_on(self._lines.push(chunk))
        STDERR.pass_on(self._lines.push(b""))
        self.pipe = None
        os.close(pipe)


class Child:
    """One running process.

    `exit_fd` becomes readable when the process ends, for polling beside sockets; None where pidfds do not exist, and after
    `terminate`. The name is for people and should be unique among siblings.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.exit_fd = _open_exit_fd(process.pid)
        assert process.stdin is not None and process.stderr is not None, "both are pipes"
        self._stdin = process.stdin
        self._stderr = _StderrTee(os.dup(process.stderr.fileno()), name, process.pid)
        process.stderr.close()
        keep_from_forks(self)

    @property
    def own_descriptors(self) -> tuple[int | None, ...]:
        """Of this process alone (forks.py): the lifeline, the child's stderr and `exit_fd`."""
        return (None if self._stdin.closed else self._stdin.fileno()), self._stderr.pipe, self.exit_fd

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def end_in_words(self) -> str:
        """The name of this process, which has ended, and how."""
        assert (code := self.process.poll()) is not None, "it has ended"
        return f"{self.name} {_describe_end(code)}"

    def send_config(self, config: bytes) -> None:
        """Hand over what the child's `receive_config` returns, before anything else. Raises ChildDied when the child is gone."""
        if len(config) > CONFIG_BYTES_MAX:
            raise ValueError(f"a configuration of {len(config)} bytes is over the bound of {CONFIG_BYTES_MAX}")
        try:
            self._stdin.write(_LENGTH.pack(len(config)) + config)
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._died(self.terminate(grace_s=_STDERR_END_TIMEOUT_S)) from error

    def check_alive(self) -> None:
        """Raise ChildDied when the process has ended, whatever its exit status."""
        if (returncode := self.process.poll()) is not None:
            raise self._died(returncode)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The return code once the process ends, None when `timeout_s` is over (None: no limit)."""
        if self.exit_fd is not None and self.process.poll() is None:
            timeout_s = REAPED_TIMEOUT_S if readable((self.exit_fd,), timeout_s) else 0.0
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self, grace_s: float) -> int:
        """Ask to end, wait `grace_s`, then kill; returns the return code. Idempotent. Does not wait for ever for a killed process
        that the system holds (a disk or a driver that does not answer)."""
        self.process.terminate()
        return self._finish(grace_s)

    def _finish(self, grace_s: float) -> int:
        returncode = self.wait(grace_s)
        if returncode is None:
            self.process.kill()
            returncode = self.wait(KILLED_TIMEOUT_S)
        self._close()
        return -signal.SIGKILL if returncode is None else returncode

    def _close(self) -> None:
        try:
            self._stdin.close()
        except BrokenPipeError:
            pass  # configuration bytes that a dead child has not read
        exit_fd, self.exit_fd = self.exit_fd, None
        if exit_fd is not None:
            os.close(exit_fd)

    def _died(self, returncode: int) -> ChildDied:
        return ChildDied(self.name, returncode, self._stderr.last_lines())


def start_child(
    name: str,
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> Child:
    """As `spawn`."""
    return Child(name, spawn(module, arguments, environment, descriptors))


@contextmanager
def signals_held() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the block ends, so that nothing is left half made. Handlers run in the main thread only.

    Masking signals in this thread would not suffice: another thread without the mask would take the signal, and the handler
    would still run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for each in came:
            signal.raise_signal(each)


def check_alive(children: Iterable[Child]) -> None:
    """Raise ChildDied for the first child that has ended."""
    for child in children:
        child.check_alive()


def terminate_all(children: Iterable[Child], grace_s: float) -> dict[str, int]:
    """End all children within one common `grace_s`, then kill; returns their return codes by name. Idempotent."""
    children = list(children)
    for child in children:
        child.process.terminate()
    end_s = time.monotonic() + grace_s
    return {child.name: child._finish(max(0.0, end_s - time.monotonic())) for child in children}


def enter_child(last_act: Callable[[bytes], None] = lambda config: None) -> bytes:
    """The first call of a child's main: ignore Ctrl-C, receive and return the configuration, and watch the parent. When the
    parent dies, this process only runs `last_act` and ends."""
    ignore_interrupts()
    config = receive_config()
    exit_when_parent_dies(last_act=lambda: last_act(config))
    return config


def name_process(name: str) -> None:
    """Name this process, in 15 bytes, for tools such as top, where the system has such names."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def receive_config() -> bytes:
    """The bytes of the parent's `send_config`. Raises EOFError when the parent is gone, ValueError for other input."""
    size_bytes = _LENGTH.unpack(_read_exactly(_LENGTH.size))[0]
    if size_bytes > CONFIG_BYTES_MAX:
        raise ValueError("stdin holds no configuration; this program is started by `vnext serve`, not by hand")
    return _read_exactly(size_bytes)


def exit_when_parent_dies(last_act: Callable[[], None] = lambda: None) -> None:
    """From now on, when the parent is gone, end this process at once, without clean-up except `last_act`. Call it after
    receive_config."""
    threading.Thread(target=_watch_lifeline, args=(last_act,), name="parent lifeline", daemon=True).start()


def _watch_lifeline(last_act: Callable[[], None]) -> None:
    while os.read(_STDIN, 4096):  # not sys.stdin: its lock would block the interpreter's orderly end
        pass
    try:
        last_act()
    finally:
        os._exit(PARENT_DIED_EXIT_CODE)


def _read_exactly(size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        chunk = os.read(_STDIN, size_bytes - len(received))
        if not chunk:
            raise EOFError("the parent closed stdin before the configuration was complete; has it died?")
        received += chunk
    return bytes(received)


def _describe_end(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    if returncode == -signal.SIGKILL:
        return "was killed by SIGKILL (when nobody did it: out of memory, see the kernel's log)"
    return f"was killed by signal {-returncode} ({signal.strsignal(-returncode)})"


def _open_exit_fd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a sandbox without the call
        return None


# ---- stacks ------------------------------------------------------------------------------------------------------
# A process that hangs writes its stacks itself when a signal asks for them, whatever its threads are doing. Python's faulthandler
# writes from the signal's handler, so a loop inside compiled code hides nothing. A process that is stopped, or held inside the
# kernel, cannot write.

ASK = signal.SIGUSR1
WAIT_S, LOOK_S = 1.0, 0.02


def write_stacks_on_signal(path: str) -> None:
    """From now on the signal makes this process write the stacks of all its threads to the file, which is made now."""
    faulthandler.register(ASK, open(path, "wb", buffering=0))  # noqa: SIM115  # for as long as the process lives


def stacks_of(processes: Mapping[Path, int]) -> dict[Path, str]:
    """What the processes write, by the file of each; "" for one that writes nothing within a second."""
    for pid in processes.values():
        with suppress(ProcessLookupError):
            os.kill(pid, ASK)
    written, before = dict.fromkeys(processes, ""), None
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and not (all(written.values()) and written == before):
        time.sleep(LOOK_S)
        before, written = written, {path: _text(path) for path in processes}
    return written


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
