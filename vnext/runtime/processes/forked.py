"""Forked: a child's process that goes on with what this one has imported. An engine core makes its first ranks so, whose imports
take longest and are mostly its own; ranks that follow are programs of their own (spawn.py), which is the plain way.

Only a young process may be forked: one thread, no sockets, nothing that computes. Its fork keeps nothing of it but modules.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.02
_ARGUMENTS = slice(45, 47)  # of what /proc/self/stat says behind the name: where the command line begins and ends


class Forked:
    """A fork, to its parent what a subprocess.Popen with pipes for stdin and stderr is."""

    def __init__(self, pid: int, stdin: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stderr = open(stdin, "wb"), open(stderr, "rb")
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """The return code once the process has ended, negative for a signal."""
        with self._waiting:
            if self.returncode is None:
                with suppress(ChildProcessError):
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code; raises TimeoutExpired. Polls: who has a pidfd waits on that."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def let_go(self) -> None:
        self.stdin.close()
        self.stderr.close()


def fork(module: str, siblings: list[Forked]) -> bool:
    """Fork this process. In the parent the fork is put beside its `siblings`. In the fork, which is to run the module's main, it is
    False; it has what a program that `spawn` begins has: its own pipes, none of its siblings', signals with their usual effects and
    the module in its command line. Raises OSError where the system starts no more."""
    (stdin, to_stdin), (from_stderr, stderr) = os.pipe(), os.pipe()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if pid := os.fork():
        siblings.append(Forked(pid, to_stdin, from_stderr))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        for each in (*siblings, Forked(0, to_stdin, from_stderr)):
            each.let_go()
        _call_it(module)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    os.close(stdin)
    os.close(stderr)
    return bool(pid)


def _call_it(module: str) -> None:
    """Put a module and no arguments into this process's command line, for tools such as ps, where it has room."""
    sys.argv[1:] = []
    with suppress(OSError, ValueError, IndexError):  # a sandbox may hide where it is
        begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS])
        line = b"\0".join(map(os.fsencode, (sys.executable, "-P", "-m", module))) + b"\0"
        if len(line) <= end - begin:
            ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
