"""Replicas: the engines of one server, started beside one another and ended together.

Owns which of them still run. Each has its engine core, supervisor, ranks, run directory and log; requests are shared out by their
clients (client/replicas.py). A server goes on for as long as one engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vnext.runtime.processes.launch import STOP_GRACE_S, RunningEngine, StartingEngine, start_engine
from vnext.runtime.processes.run_dir import remove
from vnext.runtime.processes.subprocesses import Child, ChildDied
from vnext.runtime.processes.thread_plan import usable_cores
from vnext.runtime.protocol.reasons import ENCODES
from vnext.runtime.protocol.settings import EngineSettings

if TYPE_CHECKING:
    from vnext.runtime.protocol.messages import EngineReady

log = logging.getLogger(__name__)


class RunningEngines:
    """Engines that are ready, in the order of their numbers: one, unless there are replicas."""

    def __init__(self, engines: Sequence[RunningEngine]) -> None:
        self.engines = tuple(engines)
        self._gone: set[int] = set()

    @property
    def ready(self) -> EngineReady:
        """What the first one reported. Settings and model are those of all."""
        return self.engines[0].ready

    @property
    def model_path(self) -> Path:
        return self.engines[0].model_path

    @property
    def run_dir(self) -> Path:
        """That of the first one."""
        return self.engines[0].run_dir

    @property
    def addresses(self) -> tuple[str, ...]:
        """For connect_engines."""
        return tuple(engine.address for engine in self.engines)

    @property
    def log_dirs(self) -> tuple[str, ...]:
        """The folders of the present engine cores' logs, () where the log is off."""
        return tuple(engine.log_dir for engine in self.engines if engine.log_dir)

    @property
    def log_dir(self) -> str:
        """That of the first engine whose log there is, "" where the log is off."""
        return next(iter(self.log_dirs), "")

    @property
    def living(self) -> list[int]:
        """The numbers of the engines that have not ended for good."""
        return [number for number in range(len(self.engines)) if number not in self._gone]

    @property
    def end_fds(self) -> list[int]:
        """Each becomes readable when `check_alive` should be called."""
        return [self.engines[number].end_fd for number in self.living]

    def check_alive(self) -> None:
        """Raise ChildDied when the last engine has ended and none follows; report one that is not the last."""
        for number in self.living:
            try:
                self.engines[number].check_alive()
            except ChildDied as error:
                self._gone.add(number)
                if all(ENCODES in self.engines[each].ready.environment for each in self.living):
                    raise
                log.warning("The %s and is not started again: the server goes on with the other engines", error.how)

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """End all of them at once; returns the first return code that is not 0. Idempotent."""
        if len(self.engines) == 1:
            return self.engines[0].stop(grace_s)
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self.engines)) as pool:
            codes = list(pool.map(lambda engine: engine.stop(grace_s), self.engines))
        remove(self.engines[0].run_dir)  # where the others may have written vectors of inputs when it had ended
        return next(filter(None, codes), 0)


class StartingEngines:
    """Engines that are starting: `wait` for them once, or `abandon` them."""

    def __init__(self, engines: Sequence[StartingEngine]) -> None:
        self._engines = tuple(engines)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(engine.address for engine in self._engines)

    @property
    def log_dirs(self) -> tuple[str, ...]:
        return tuple(engine.log_dir for engine in self._engines if engine.log_dir)

    @property
    def run_dir(self) -> Path:
        """That of the first one."""
        return self._engines[0].run_dir

    def wait(self, beside: Sequence[Child] = ()) -> RunningEngines:
        """The engines once all are ready. Raises StartFailed or ChildDied, also when a child `beside` them dies; then nothing of
        them is left behind."""
        running: list[RunningEngine] = []
        try:
            for engine in self._engines:
                running.append(engine.wait(beside))
        except BaseException:
            for each in running:
                each.stop()
            for engine in self._engines[len(running) + 1 :]:  # the one that failed has ended itself
                engine.abandon()
            raise
        _warn(running)
        return RunningEngines(running)

    def abandon(self) -> None:
        """End all that has been started."""
        for engine in self._engines:
            engine.abandon()


def start_engines(settings: EngineSettings, model_path: Path, cores: Sequence[Child | None] = ()) -> StartingEngines:
    """Start `data_parallel_size` engines, of the processes of `start_cores` if there are any. Returns at once. Raises what
    `start_engine` does, and leaves none behind then, but for such processes."""
    started: list[StartingEngine] = []
    try:
        for replica, core in enumerate(cores or [None] * settings.data_parallel_size):
            started.append(start_engine(settings, model_path, replica, started[0].inputs_dir if started else "", core))
    except BaseException:
        StartingEngines(started).abandon()
        raise
    return StartingEngines(started)


def _warn(engines: Sequence[RunningEngine]) -> None:
    """Report engines that share cores."""
    first, cores = engines[0].ready, usable_cores()
    ranks = len(engines) * first.world_size
    if len(engines) > 1 and first.environment.get("device") == "cpu" and ranks > cores:
        log.warning("%d engines with %d ranks share %d core(s): fewer of them would answer faster", len(engines), ranks, cores)
