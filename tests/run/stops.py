"""Engine cores that stop themselves in mid stream: what a test does there never comes too late, however slow it is.

Owns the test's side; tests/run/stopping has the core's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import ROOT, Server, held, in_background
from tests.runtime.fake_engine import wait_until
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.processes.launch import RunningEngine
from vnext.runtime.protocol.merged_output import TakenOutput
from vnext.runtime.protocol.messages import SubmitRequest

CORE = "vnext.runtime.engine.main"
MID_STREAM = 12
"""Messages to the ranks, about one for each step: an answer of 60 tokens has begun then and is far from its end."""


class Stops:
    """For the engine cores of programs that start with its environment, one after another."""

    def __init__(self, folder: Path) -> None:
        self._stop, self._asked = folder / "stop", folder / "asked"
        paths = [str(Path(__file__).parent / "stopping"), os.environ.get("PYTHONPATH") or str(ROOT)]
        self.environment = {"STOPS": str(folder), "PYTHONPATH": os.pathsep.join(paths)}

    def ask(self, messages: int = MID_STREAM) -> None:
        """Have the core that serves stop before it sends its ranks the last of so many messages."""
        new = self._stop.with_suffix(".new")
        new.write_text(str(messages))
        new.replace(self._stop)

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Wait until this core has stopped. Behind the block it goes on, if it lives."""
        core = psutil.Process(pid)
        wait_until(lambda: core.status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                core.resume()

    @contextmanager
    def held(self, server: Server) -> Iterator[None]:
        """Wait until the server's core has stopped; in the block it goes on, and waits for its rank, which is stopped in mid stream."""
        with ExitStack() as rest:
            with self.stopped(server.process_of(CORE).pid):
                rest.enter_context(held(server))
            yield

    @contextmanager
    def mid_stream(self, engine: RunningEngine, client: SyncEngineClient, asked: Sequence[SubmitRequest]) -> Iterator[list[TakenOutput]]:
        """Ask; in the block the engine core has stopped in the middle of the answers. Behind it the list has all outputs, or what
        ended them is raised."""
        outputs: list[TakenOutput] = []
        self.ask()
        thread, ended = in_background(lambda: outputs.extend(client.run(asked)))
        try:
            with self.stopped(engine.child.pid):
                yield outputs
        finally:
            thread.join()
        if ended[0] is not None:
            raise ended[0]

    @contextmanager
    def operation(self) -> Iterator[None]:
        """What is asked of the engine in the block has reached its core when the block ends."""
        self._asked.unlink(missing_ok=True)
        yield
        wait_until(self._asked.exists)


@pytest.fixture
def stops(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Stops:
    """For the engines that a test starts."""
    made = Stops(tmp_path_factory.mktemp("stops"))
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made
