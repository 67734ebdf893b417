"""The publisher: one rank's part of the blocks that its engine hands over, in files in shared memory.

A hand-over copies its pages between two steps; a thread then writes those files that are not there yet. The oldest leave when there
are more than fit. With recurrent layers the snapshot behind the last block leaves too. Decides nothing else: what is handed over
stands in events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from vnext.runtime.hosts.handover.source import split_address
from vnext.runtime.hosts.handover.tcp import BlockServer
from vnext.runtime.protocol.messages import BlocksPublished, HandoverPlace
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.state.events import AnyEvent, BlocksHandedOver
from vnext.state.facilities.handover import handed_over, snapshot_of
from vnext.state.state import State

log = logging.getLogger(__name__)


class BlockFiles(Protocol):
    """The files of one rank (vnext/runtime/hosts/handover/page_files.py)."""

    file_bytes: int

    def list(self) -> list[tuple[float, bytes]]: ...

    def write(self, name: bytes, parts: Sequence[bytes | memoryview]) -> None: ...

    def remove(self, names: Iterable[bytes]) -> None: ...

    def close(self) -> None: ...


class Shelf:
    """Pages of one kind, in files for others. `put` belongs to one thread, the rest to another."""

    def __init__(self, files: BlockFiles, rows: Callable[[], list[np.ndarray]], bytes_max: int) -> None:
        """`rows`: the memory of all pages, as uint8 [page_count, bytes] each."""
        self.files, self._rows = files, rows
        self._count_max = bytes_max // files.file_bytes
        self._names = {name: None for _, name in files.list()}  # oldest first

    def copy(self, pages: Iterable[int]) -> list[list[bytes]]:
        rows = self._rows()
        return [[memory[page].tobytes() for memory in rows] for page in pages]

    def put(self, names: Sequence[bytes], copies: Sequence[Sequence[bytes]]) -> tuple[int, OSError | None]:
        """Write what is not there yet; the oldest leave. How many are there now, and why no more."""
        count, why = 0, None
        try:
            for name, parts in zip(names[: self._count_max], copies):
                if name not in self._names:
                    self.files.write(name, parts)
                self._names.pop(name, None)
                self._names[name] = None  # the newest
                count += 1
        except OSError as error:
            why = error
        excess = list(self._names)[: max(0, len(self._names) - self._count_max)]
        self.files.remove(excess)
        for name in excess:
            del self._names[name]
        return count, why


def block_server(settings: RankSettings, secret: bytes, reads: Mapping[bytes, Callable[[bytes], bytes]]) -> BlockServer | None:
    """What serves a rank's files to other hosts at --handover-address; None without one. Raises SettingsError."""
    if not settings.handover_address:
        return None
    host, port = split_address(settings.handover_address)
    try:
        return BlockServer((host, port + settings.place if port else 0), secret, reads)
    except OSError as error:
        why = f"--handover-address is {settings.handover_address}, where rank {settings.rank} cannot listen"
        raise SettingsError(f"{why} ({error.strerror}): give another one") from error


class VectorOffer:
    """The vectors of inputs that an engine has encoded for others: files in `folder`, and what serves them, None where they stay
    on this host."""

    is_busy = False

    def __init__(self, folder: str, server: BlockServer | None) -> None:
        self._server, self.place = server, HandoverPlace(folder=folder, address=server.address if server else "")

    def reports(self) -> tuple[BlocksPublished, ...]:
        """Vectors are there when their step is."""
        return ()

    def fold(self, event: AnyEvent, state: State) -> None:
        """No event asks for them."""

    def close(self) -> None:
        """Serve nobody any more."""
        if self._server is not None:
            self._server.close()


class Publisher:
    """The blocks of one rank for others, and snapshots. All methods belong to one thread."""

    def __init__(
        self, rank: int, folder: str, blocks: Shelf, server: BlockServer | None, snapshots: Shelf | None = None
    ) -> None:
        """`server`: None where blocks stay on this host. `snapshots`: None without recurrent layers."""
        self._rank, self._blocks, self._snapshots, self._server = rank, blocks, snapshots, server
        self._writer = ThreadPoolExecutor(1, "handover-write")
        self._futures: list[Future[BlocksPublished]] = []
        self._has_warned = False
        self.place = HandoverPlace(folder=folder, address=server.address if server else "")

    @property
    def is_busy(self) -> bool:
        """Whether `reports` has one to come."""
        return bool(self._futures)

    def reports(self) -> list[BlocksPublished]:
        """What has been published since the last call."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        return [future.result() for future in done]

    def fold(self, event: AnyEvent, state: State) -> None:
        """Do what an event asks for, which has led to `state`."""
        if isinstance(event, BlocksHandedOver):
            names, pages = handed_over(state, event)
            leaving = [(self._blocks, names, self._blocks.copy(pages.tolist()))]
            if self._snapshots is not None:
                state_page = snapshot_of(state, names)
                leaving.append((self._snapshots, names[-1:], self._snapshots.copy([state_page])))
            self._futures.append(self._writer.submit(self._publish, event.id, leaving))

    def close(self) -> None:
        """End the thread, with what it has begun, and serve nobody any more."""
        if self._server is not None:
            self._server.close()
        self._writer.shutdown()
        for shelf in (self._blocks, self._snapshots):
            if shelf is not None:
                shelf.files.close()

    def _publish(self, id_: int, leaving: Sequence[tuple[Shelf, Sequence[bytes], Sequence[Sequence[bytes]]]]) -> BlocksPublished:
        counts = []
        for shelf, names, copies in leaving:
            count, why = shelf.put(names, copies)
            counts.append(count)
            if why is not None and not self._has_warned:
                self._has_warned = True
                log.warning("Blocks are not handed over, and other engines compute them: %s", why)
        return BlocksPublished(rank=self._rank, id=id_, count=counts[0])
