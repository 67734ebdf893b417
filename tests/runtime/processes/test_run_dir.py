"""Run directories: gone with the start that made them, however it ends, and nothing else is ever removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import wait_until

from vnext.media.vectors import VectorFiles, Vectors
from vnext.runtime.processes.replicas import RunningEngines
from vnext.runtime.processes.run_dir import LOCK_NAME, RunDir, shared_twin

ROOT = Path(__file__).parents[3]
HOLDER = "from vnext.runtime.processes.run_dir import RunDir; made = RunDir(); print(made.path, flush=True); input()"
LAUNCHER = """
from vnext.runtime.processes.launch import DEMO_MODEL, start_engine
from vnext.runtime.protocol.settings import EngineSettings
starting = start_engine(EngineSettings(log="off", threads=1), DEMO_MODEL)
print(starting.address, flush=True)
input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary things of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def program(source: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A program that runs, and the line that it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_run_directory_is_private_and_goes(temporary: Path) -> None:
    made = RunDir()
    assert made.path.parent == temporary and made.path.stat().st_mode & 0o777 == 0o700
    made.remove()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_what_killed_starts_left_goes_at_the_next_start_and_nothing_else(temporary: Path) -> None:
    liveness, living = program(HOLDER, temporary)
    dies, dead = program(HOLDER, temporary)
    end(dies)
    (Path(dead) / "engine").touch()
    (temporary / "vnext-of-another-program").mkdir()
    (temporary / "vnext-file").touch()
    (temporary / "other").mkdir()
    (temporary / "other" / LOCK_NAME).touch()
    (temporary / "vnext-link").symlink_to(temporary / "other")
    made = RunDir()
    left = {path.name for path in temporary.iterdir()}
    assert left == {made.path.name, Path(living).name, "vnext-of-another-program", "vnext-file", "vnext-link", "other"}
    assert (temporary / "other" / LOCK_NAME).exists()
    end(liveness)
    RunDir().remove()
    assert not Path(living).exists() and made.path.exists()


def test_a_folder_that_a_sweep_has_taken_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep comes between the lock's making and its taking, the first two times."""
    make, swept = os.open, []

    def open_and_sweep(path: Path, flags: int, mode: int = 0o777) -> int:
        handle = make(path, flags, mode)
        if len(swept) < 2:
            swept.append(path)
            path.unlink()
            path.parent.rmdir()
        return handle

    monkeypatch.setattr(os, "open", open_and_sweep)
    made = RunDir()
    assert len(swept) == 2 and made.path.exists() and (made.path / LOCK_NAME).exists()


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    process, address = program(LAUNCHER, tmp_path)
    socket = Path(address.removeprefix("ipc://"))
    wait_until(socket.exists)
    end(process)
    wait_until(lambda: not socket.parent.exists())
    assert list(tmp_path.iterdir()) == []


class Ending:
    """An engine that ends when `other` has, with a last file of vectors in the folder of the first one."""

    def __init__(self, shared: Path | None = None, other: Ending | None = None) -> None:
        self._own, self._shared, self._other, self.has_ended = RunDir(), shared or Path(), other, threading.Event()
        self.run_dir = self._own.path

    def stop(self, grace_s: float) -> int:
        if self._other is not None:
            assert self._other.has_ended.wait(grace_s)
            vectors = Vectors(np.zeros((4, 8), np.uint8), np.zeros(4, np.int64), "float32")
            VectorFiles(self._shared, {"model": "a"}, 10_000).write(b"x" * 15, vectors)
        self._own.remove()
        self.has_ended.set()
        return 0


def test_an_engine_that_ends_last_leaves_nothing_in_the_first_ones_folder(temporary: Path) -> None:
    first = Ending()
    engines: Any = first, Ending(shared_twin(first.run_dir), first)
    assert RunningEngines(engines).stop(10.0) == 0
    assert not shared_twin(first.run_dir).exists() and list(temporary.iterdir()) == []
