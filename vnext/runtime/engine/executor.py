"""Executors: how the ranks of an engine run. One interface, two implementations.

    mp        each rank its own process; events over the shared-memory ring, results over a Unix socket each
    inproc    one rank inside the engine core's process: the same program without a channel, for tests and small tools
    none      no ranks, for as long as others start in the place of those that were lost
Owns the ranks' lifetime: an executor serves one set of ranks. Decides nothing and does not inspect messages.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq
from msgspec.structs import replace

from vnext.models.errors import ModelError
from vnext.runtime.processes.proc import why_halted
from vnext.runtime.processes.subprocesses import Child, ChildDied, RankStartFailed, check_alive, stacks_of, terminate_all
from vnext.runtime.protocol.messages import RankFailed, RankMessage, RankReady, StepResult, encoder
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.transport.ring.results import ResultsReceiver
from vnext.runtime.transport.ring.writer import RingWriter

if TYPE_CHECKING:
    from vnext.runtime.rank.replica import Rank

POLL_S = 0.2
STOP_GRACE_S = 5.0
rank_decoder = msgspec.msgpack.Decoder(RankMessage)
log = logging.getLogger(__name__)


class Executor(Protocol):
    """Ranks that fold the messages sent to them, in order, and answer each planned step.

    `send` calls `while_full` now and then while it waits for a rank; `while_full` may raise.
    """

    while_full: Callable[[], None]

    def start(self) -> tuple[RankReady, ...]:
        """Load the ranks. Raises RankStartFailed or ChildDied."""

    def begin(self) -> None:
        """Let the ranks load, without waiting; `started` follows. Raises ChildDied."""
        return

    def started(self) -> tuple[RankReady, ...] | None:
        """What `start` returns, None while a rank loads. Raises as `start` does."""

    def send(self, message: bytes) -> None:
        """Send one message to every rank; blocks while a rank is too far behind."""
        return

    def receive(self) -> list[RankMessage]:
        """All messages that have arrived, without waiting."""

    def watch(self, poller: zmq.Poller) -> None:
        """Register every file descriptor that becomes readable when `receive` or `check` has news."""
        return

    def check(self, ready: Collection[object] | None = None) -> None:
        """Raise ChildDied if a rank has ended. With `ready`, a poller's report, look only if that report shows it."""
        return

    def why_silent(self, step: int) -> str:
        """Which ranks have not answered a step that was sent, and why, as far as this process can see."""

    def stacks(self, step: int) -> dict[int, str]:
        """The stacks of those ranks, by rank, "" for one that does not tell; takes up to a second."""

    def kill(self) -> None:
        """End the ranks at once, without waiting for it: see `has_ended`. Only `stop` may follow."""
        return

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have ended, so that their memory is free."""

    @property
    def has_results(self) -> bool:
        """Whether there are results that no poller can see."""

    @property
    def stalls(self) -> tuple[int, float]:
        """How often a rank was too far behind, and the seconds for which that delayed the engine."""

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the ranks; they have `grace_s` to end by themselves."""
        return


class MpExecutor:
    """Ranks as processes that wait for their settings: `settings_of(rank, ring name, results address, rendezvous)`.

    `generation` counts the executors of an engine: ranks of one never meet those of another.
    """

    while_full: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        children: Sequence[Child],
        run_dir: Path,
        settings_of: Callable[[int, str, str, str], RankSettings],
        generation: int = 0,
    ) -> None:
        """Raises OSError without room for the ring."""
        self._children = children
        self._settings_of = settings_of
        self._ready: dict[int, RankReady] = {}
        self._are_ready = False
        self._answered = [-1] * len(children)  # each rank's latest step
        self._ring = RingWriter.create(reader_count=len(children))
        self._exit_fds = {child.exit_fd for child in children}
        self._address = f"{run_dir}/results-{generation}"
        self._rendezvous = run_dir / f"rendezvous-{generation}"
        self._stack_files = [run_dir / f"stacks-{generation}-{rank}" for rank in range(len(children))]
        self._results = ResultsReceiver(self._address, len(children))
        self._came: list[RankMessage] = []
        self._poller: zmq.Poller | None = None
        self._watched: set[int] = set()

    def start(self) -> tuple[RankReady, ...]:
        self.begin()
        while (ready := self.started()) is None:
            self._results.wait(POLL_S)
        return ready

    def begin(self) -> None:
        for rank, child in enumerate(self._children):
            settings = self._settings_of(rank, self._ring.name, self._address, str(self._rendezvous))
            settings = replace(settings, stack_file=str(self._stack_files[rank]))
            child.send_config(encoder.encode(settings))

    def started(self) -> tuple[RankReady, ...] | None:
        self._take_ready()
        try:
            self.check()
        except ChildDied:
            self._take_ready()  # its last message may have arrived since
            raise
        if len(self._ready) < len(self._children):
            return None
        self._are_ready = True
        self._ring.unlink()  # all ranks are attached: a killed engine leaves nothing in shared memory
        return tuple(self._ready[rank] for rank in sorted(self._ready))

    def _take_ready(self) -> None:
        """Note the ranks that are ready. Raises RankStartFailed for one that cannot start."""
        self._results.wait(0.0)
        for message in self.receive():
            if isinstance(message, RankFailed):
                raise RankStartFailed(message.message)
            assert isinstance(message, RankReady), "a rank's first message"
            self._ready[message.rank] = message

    def send(self, message: bytes) -> None:
        self._ring.write(message, is_alive=self._wait_on)

    def _wait_on(self) -> None:
        """Take results while the ring is full: a rank may itself wait until we read a long result."""
        self.check()
        self._take()
        self.while_full()

    def receive(self) -> list[RankMessage]:
        self._take()
        messages, self._came = self._came, []
        return messages

    def _take(self) -> None:
        """Keep arrived messages until `receive`. Drop, with a log line, bytes that no rank of ours sends."""
        for data in self._results.messages():
            try:
                message = rank_decoder.decode(data)
            except (ValueError, RecursionError) as error:
                log.warning("a rank's message could not be read and was dropped: %s", error)
                continue
            self._came.append(message)
            if type(message) is StepResult:
                self._answered[message.rank % len(self._children)] = message.step
        while self._results.ended:
            ended = self._results.ended.pop()
            self._unwatch(ended.fileno())
            ended.close()

    def watch(self, poller: zmq.Poller) -> None:
        self._poller = poller
        exits = (child.exit_fd for child in self._children if child.exit_fd is not None)
        self._watched = {*(each.fileno() for each in self._results.sockets), *exits}
        for file in self._watched:
            poller.register(file, zmq.POLLIN)

    def _unwatch(self, *files: int) -> None:
        """Forget files that the poller watches, before they are closed: the system uses their numbers again."""
        for file in self._watched.intersection(files):
            assert self._poller is not None, "what is watched has a poller"
            self._poller.unregister(file)
        self._watched.difference_update(files)

    def check(self, ready: Collection[object] | None = None) -> None:
        if ready is None or None in self._exit_fds or not self._exit_fds.isdisjoint(ready):
            check_alive(child for child in self._children if ready is None or child.exit_fd is None or child.exit_fd in ready)

    def why_silent(self, step: int) -> str:
        silent = self._silent(step)
        halted = {rank: why for rank, pid in silent.items() if (why := why_halted(pid))}
        named = [f"rank {rank} (process {silent[rank]}){halted.get(rank, '')}" for rank in halted or silent]
        return ", ".join(named) + ("" if halted else f" {'does' if len(named) == 1 else 'do'} not answer")

    def stacks(self, step: int) -> dict[int, str]:
        silent = self._silent(step)
        found = stacks_of({self._stack_files[rank]: pid for rank, pid in silent.items()})
        return {rank: found[self._stack_files[rank]] for rank in silent}

    def _silent(self, step: int) -> dict[int, int]:
        """The processes that have not answered a step, by rank."""
        return {rank: child.pid for rank, child in enumerate(self._children) if self._answered[rank] < step}

    def kill(self) -> None:
        self._unwatch(*self._watched)
        for child in self._children:
            child.process.kill()

    @property
    def has_ended(self) -> bool:
        return all(child.process.poll() is not None for child in self._children)

    @property
    def has_results(self) -> bool:
        return bool(self._came)

    @property
    def stalls(self) -> tuple[int, float]:
        return self._ring.stall_count, self._ring.stall_seconds

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        self._unwatch(*self._watched)
        self._ring.close()
        end_s = time.monotonic() + grace_s
        for child in self._children if self._are_ready else ():  # a rank that is not ready does not read the ring
            child.wait(max(0.0, end_s - time.monotonic()))
        terminate_all(self._children, grace_s=1.0)
        self._results.close()
        for file in (self._rendezvous, *self._rendezvous.parent.glob(f"{self._rendezvous.name}-*"), *self._stack_files):
            shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)


class InprocExecutor:
    """One rank in this process. `send` handles a message at once; its result waits for `receive`."""

    while_full: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._rank: Rank | None = None

    def start(self) -> tuple[RankReady, ...]:
        from vnext.runtime.rank.loading import load_rank, ready_message

        try:
            self._rank, runner = load_rank(self._settings, Path(self._settings.rendezvous))
        except (ModelError, SettingsError) as error:
            raise RankStartFailed(str(error)) from error
        self._ready = (ready_message(self._settings, runner, self._rank),)
        return self._ready

    @property
    def _loaded(self) -> Rank:
        assert self._rank is not None, "a rank is loaded before it is asked"
        return self._rank

    def begin(self) -> None:
        self.start()

    def started(self) -> tuple[RankReady, ...] | None:
        return self._ready

    def send(self, message: bytes) -> None:
        self._loaded.handle(message)

    def receive(self) -> list[RankMessage]:
        return list(self._loaded.collect())

    def watch(self, poller: zmq.Poller) -> None:
        """Nothing to poll: see `has_results`."""

    def check(self, ready: Collection[object] | None = None) -> None:
        """The rank lives as long as this process."""

    def why_silent(self, step: int) -> str:
        return "it is computed in the engine core's own process"

    def stacks(self, step: int) -> dict[int, str]:
        return {}

    def kill(self) -> None:
        """Its rank cannot be lost alone."""

    has_ended, stalls = False, (0, 0.0)

    @property
    def has_results(self) -> bool:
        return self._loaded.poll_timeout_s is not None

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Let others use the folders of its rank."""
        if self._rank is not None:
            self._rank.close()


class NoRanks(Executor):
    """What is sent is dropped, since ranks that start later begin with a state that knows it; and nothing comes."""

    while_full: Callable[[], None] = staticmethod(lambda: None)
    has_ended, has_results, stalls = True, False, (0, 0.0)

    def start(self) -> tuple[RankReady, ...]:
        return ()

    def started(self) -> tuple[RankReady, ...] | None:
        return None

    def receive(self) -> list[RankMessage]:
        return []

    def why_silent(self, step: int) -> str:
        return "there are no ranks"

    def stacks(self, step: int) -> dict[int, str]:
        return {}
