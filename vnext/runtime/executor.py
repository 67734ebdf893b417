"""Executors: how the ranks of an engine are run. One face, two forms.

    mp        each rank its own process; events over the shared-memory ring, results over ZMQ
    inproc    one rank inside the engine core's process: the same program without a channel, for tests and small tools
Owns the ranks' life. Decides nothing and looks into no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from vnext.runtime.children import Child, check_alive, terminate_all
from vnext.runtime.messages import RankFailed, RankMessage, RankReady, StepResult, encoder, rank_decoder
from vnext.runtime.ring import RingWriter
from vnext.runtime.settings import RankSettings, SettingsError

POLL_MS = 200
READABLE = int(zmq.POLLIN)
STOP_GRACE_S = 5.0


class RankStartFailed(Exception):
    """A rank could not start: its own sentence."""


class Executor(Protocol):
    """Ranks that fold the messages sent to them, in order, and answer each planned step."""

    def start(self) -> tuple[RankReady, ...]:
        """Load the ranks; raises RankStartFailed or ChildDied."""

    def send(self, message: bytes) -> None:
        """One message to every rank; blocks while a rank is too far behind."""

    def receive(self) -> list[RankMessage]:
        """What has come, without waiting."""

    def watch(self, poller: zmq.Poller) -> None:
        """Register whatever becomes readable when `receive` or `check` has news."""

    def check(self) -> None:
        """Raise ChildDied if a rank has ended."""

    @property
    def has_results(self) -> bool:
        """Results are there that no poller can see."""

    @property
    def stall_count(self) -> int:
        """How often a rank was too far behind."""

    @property
    def stall_seconds(self) -> float:
        """How long that held everybody up, in all."""

    def stop(self) -> None:
        """End the ranks."""


class MpExecutor:
    """Ranks as processes that wait for their settings, `settings_of(rank, ring name, results address, rendezvous)`."""

    def __init__(
        self, children: Sequence[Child], run_dir: Path, settings_of: Callable[[int, str, str, str], RankSettings]
    ) -> None:
        self._children = children
        self._run_dir = run_dir
        self._settings_of = settings_of
        self._are_ready = False
        self._ring = RingWriter.create(reader_count=len(children))
        self._context = zmq.Context()
        self._results = self._context.socket(zmq.PULL)
        self._address = f"ipc://{run_dir}/results"
        self._results.bind(self._address)

    def start(self) -> tuple[RankReady, ...]:
        for rank, child in enumerate(self._children):
            settings = self._settings_of(rank, self._ring.name, self._address, str(self._run_dir / "rendezvous"))
            child.send_config(encoder.encode(settings))
        ready: dict[int, RankReady] = {}
        while len(ready) < len(self._children):
            if not self._results.poll(POLL_MS):
                self.check()
                continue
            message = rank_decoder.decode(self._results.recv())
            if isinstance(message, RankFailed):
                raise RankStartFailed(message.message)
            ready[message.rank] = message
        self._are_ready = True
        self._ring.unlink()  # all ranks are attached: a killed engine leaves nothing behind in shared memory
        return tuple(ready[rank] for rank in range(len(ready)))

    def send(self, message: bytes) -> None:
        self._ring.write(message, is_alive=self.check)

    def receive(self) -> list[RankMessage]:
        messages = []
        while self._results.get(zmq.EVENTS) & READABLE:
            messages.append(rank_decoder.decode(self._results.recv()))
        return messages

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._results, zmq.POLLIN)
        for child in self._children:
            if child.exit_fd is not None:
                poller.register(child.exit_fd, zmq.POLLIN)

    def check(self) -> None:
        check_alive(self._children)

    @property
    def has_results(self) -> bool:
        return False

    @property
    def stall_count(self) -> int:
        return self._ring.stall_count

    @property
    def stall_seconds(self) -> float:
        return self._ring.stall_seconds

    def stop(self) -> None:
        self._ring.close()
        for child in self._children if self._are_ready else ():  # one that is not does not look at the ring
            child.wait(STOP_GRACE_S)
        terminate_all(self._children, grace_s=1.0)
        self._results.close(linger=0)
        self._context.term()


class InprocExecutor:
    """One rank in this process. A message is handled while it is sent; its result waits for `receive`."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._rank = None
        self._done: deque[StepResult] = deque()

    def start(self) -> tuple[RankReady, ...]:
        from vnext.models.errors import ModelError
        from vnext.runtime.loading import load_rank, ready_message

        try:
            self._rank, runner = load_rank(self._settings, Path(self._settings.rendezvous))
        except (ModelError, SettingsError) as error:
            raise RankStartFailed(str(error)) from error
        return (ready_message(self._settings, runner),)

    def send(self, message: bytes) -> None:
        if (result := self._rank.handle(message)) is not None:
            self._done.append(result)

    def receive(self) -> list[RankMessage]:
        done = [*self._done, *self._rank.collect()]
        self._done.clear()
        return done

    def watch(self, poller: zmq.Poller) -> None:
        """Nothing to poll: see `has_results`."""

    def check(self) -> None:
        """The rank lives as long as this process."""

    @property
    def has_results(self) -> bool:
        return bool(self._done) or self._rank.patience_s is not None

    @property
    def stall_count(self) -> int:
        return 0

    @property
    def stall_seconds(self) -> float:
        return 0.0

    def stop(self) -> None:
        """Nothing to end."""
