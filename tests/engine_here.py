"""An engine core as a thread of the tests' process, the core's own program without the process around it; packages for engines to find.

For tests that compare what many engines answer. A process a test would mostly load torch; that an engine works in its
processes is asked elsewhere (tests/e2e).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vnext import LLM
from vnext.base.exits import FAILED
from vnext.kernels.cpu import native
from vnext.runtime.engine import process as core_process
from vnext.runtime.processes import rank_processes
from vnext.runtime.protocol.settings import CoreSettings, EngineSettings

OWN_LEVEL = native.level() if native.is_built() else None
"""Which processes begin with: the fastest, not always the best (Intel's AVX512_BF16)."""


class CoreThread:
    """In place of launch's Child. Mutable; one that has ended stays so."""

    def __init__(self, name: str, engine: EngineSettings) -> None:
        assert engine.executor == "inproc", "ranks of their own need a process that only they have"
        self.name, self.process = name, self
        self._exit, self._exiting = socket.socketpair()
        self._waker, self._wake = socket.socketpair()
        self._thread: threading.Thread | None = None
        self.returncode, self._has_ended = 0, False

    def send_config(self, config: bytes) -> None:
        settings = msgspec.msgpack.decode(config, type=CoreSettings)
        self._thread = threading.Thread(target=self._run, args=(settings,), name="engine core", daemon=True)
        self._thread.start()

    def _run(self, settings: CoreSettings) -> None:
        self.returncode = FAILED  # until `run` returns: an exception is pytest's to tell, and no other core follows
        try:
            self.returncode = core_process.run_until(self._wake, settings)
        finally:
            self._exiting.close()
            self._has_ended = True

    @property
    def exit_fd(self) -> int | None:
        """Becomes readable when the core ends."""
        return self._exit.fileno() if self._exit.fileno() >= 0 else None

    @property
    def end_in_words(self) -> str:
        return f"{self.name} ended with exit status {self.returncode}"

    def poll(self) -> int | None:
        """As of Popen."""
        return self.returncode if self._has_ended else None

    def check_alive(self) -> None:
        assert self._thread.is_alive(), f"the engine core has ended with {self.returncode}"

    def terminate(self, grace_s: float) -> int:
        """Ask the core to end and wait for it. Idempotent."""
        if self._waker.fileno() >= 0:
            self._waker.send(b"e")
            if self._thread is not None:
                self._thread.join(grace_s)
                assert not self._thread.is_alive(), f"the engine core goes on {grace_s} s after it was asked to end"
            for each in (self._waker, self._wake, self._exit):
                each.close()
        return self.returncode


@contextmanager
def engines_here() -> Iterator[None]:
    """Engines that LLM(executor="inproc") starts inside the block are threads of this process. They begin with the instruction set
    of a process of its own, whatever an engine before them was asked to use, and leave it so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "start_core", CoreThread)
        patch.setattr(core_process, "prepare_process", lambda threads, prescribe: None)
        _use_own_level()
        try:
            yield
        finally:
            _use_own_level()


@contextmanager
def llm_here(model: object, **settings: Any) -> Iterator[LLM]:
    """An LLM whose engine is a thread of this process, and computes in one of its threads."""
    with engines_here(), LLM(str(model), **{"executor": "inproc", "threads": 1} | settings) as llm:
        yield llm


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, points: Mapping[str, str], modules: Mapping[str, str]) -> None:
    """Install a package of the modules, by their sources, with entry points of a group, by their values: this process finds it, and so
    do those that it starts."""
    info = folder / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(folder))


def _use_own_level() -> None:
    if OWN_LEVEL is not None:
        native.set_level(OWN_LEVEL)
