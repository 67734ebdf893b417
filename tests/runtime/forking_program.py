"""A program with torch loaded that runs what tests ask for in forks: loading torch once costs less than each time.

Both sides of it: `serve` in the program, which has no threads and so may fork, and Program in the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vnext.runtime.processes import futex

ROOT = Path(__file__).parents[2]
Mode = Callable[..., Iterable[Any]]
NEEDS_LOCKS = pytest.mark.skipif(
    not isinstance(futex.choose_wait_method(), futex.Futex), reason="deaths are noticed by locks that only Linux has"
)


def serve(modes: dict[str, Mode]) -> None:
    """Read a line [mode, argument, ...], print a line [exit status, all that the mode gave], until stdin ends."""
    for line in sys.stdin:
        mode, *arguments = json.loads(line)
        print(json.dumps(_told_by_a_fork(modes[mode], arguments)), flush=True)


def _told_by_a_fork(mode: Mode, arguments: list[Any]) -> tuple[int, list[Any]]:
    """What a mode gives, and the exit status of the fork it ran in: a mode may change whatever it likes."""
    pipe_in, pipe_out = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(pipe_in)
        try:
            with os.fdopen(pipe_out, "w") as reported:
                reported.write(json.dumps(list(mode(*arguments))))
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(1)
    os.close(pipe_out)
    with os.fdopen(pipe_in) as reported:
        said = reported.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(said or "[]")


class Failed(Exception):
    """A mode did not come to its end: what it said on stderr."""


class Program:
    """The program of a file beside this one, in the tests. Mutable: `end` it."""

    def __init__(self, file: str, stderr: Path) -> None:
        command, environment = [sys.executable, str(Path(__file__).with_name(file))], os.environ | {"PYTHONPATH": str(ROOT)}
        self._stderr = stderr
        with stderr.open("w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, text=True, stderr=errors, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    def __call__(self, mode: str, *arguments: object) -> list[Any]:
        """What the mode gave, which said nothing on stderr. Raises Failed."""
        said_bytes = self._stderr.stat().st_size
        self._process.stdin.write(json.dumps([mode, *arguments]) + "\n")
        self._process.stdin.flush()
        status, reported = json.loads(self._process.stdout.readline())
        said = self._stderr.read_bytes()[said_bytes:].decode()
        if status or said:
            raise Failed(f"{mode} ended with {status}: {said}")
        return reported

    def end(self) -> int:
        """Its exit status."""
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()


def running(name: str, folders: pytest.TempPathFactory) -> Iterator[Program]:
    """The program for a module's fixture. It must end in order."""
    program = Program(name, folders.mktemp("program") / "stderr")
    yield program
    assert program.end() == 0
