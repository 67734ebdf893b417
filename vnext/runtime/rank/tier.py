"""The disk tier of one rank: pages are written and read beside the running steps, and read from other engines' ranks.

A page to be written is copied between two steps, and its file is written by a thread of its own; the engine core asks for few at a
time, which bounds the copies. A page that comes back is read and checked by another thread, and filled while no step knows it: by
that thread on the host, by the rank's on a GPU (vnext/runtime/gpu/pages.py). Snapshots of recurrent layers are pages and files of
another size.
Decides nothing: what is written, read and removed stands in messages and events.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from vnext.base.spelling import reason
from vnext.runtime.hosts.handover.page_files import HEADER_BYTES, PageFiles, checksum_in
from vnext.runtime.hosts.handover.receiving import Pages, Receiver
from vnext.runtime.hosts.handover.source import BlockSource, HandoverFailed
from vnext.runtime.protocol.messages import BlocksRead, BlocksWritten, DiskFound
from vnext.runtime.transport.collectives.errors import shortage_of
from vnext.runtime.transport.ring.broadcast import FetchBlocks, StoreBlocks
from vnext.state.events import (
    AnyEvent,
    BlocksPromoted,
    PrefixCacheReset,
    PromotionEnded,
    SnapshotsChanged,
    TierChanged,
    TierOpened,
)
from vnext.state.facilities.tier import names_in
from vnext.state.state import State, Transfer

WRITER_NICENESS, SAID_MAX = 10, 32
Rows = Callable[[], list[np.ndarray]]
"""The memory of all pages on the host: uint8 [page_count, bytes] each."""
Buffer = bytearray | memoryview
"""A file: its header, and behind HEADER_BYTES a page."""
log = logging.getLogger(__name__)


class Filling(Protocol):
    """The pages of one transfer. `room` and `put` belong to the thread that reads, the rest to the rank's."""

    def room(self) -> Buffer | None:
        """Memory for the next file. Waits; None if the transfer is over."""

    def put(self, page: int) -> bool:
        """Have a page filled from the file in the last `room`; False if the transfer is over."""

    def look(self) -> bool:
        """Go on; whether steps behind `stop` read all that was put."""

    def stop(self) -> None:
        """Fill no page from here on. Steps that are launched later come after what is being filled."""


class PageMemory(Protocol):
    """The memory of a rank's pages: HostPages, or DevicePages of vnext/runtime/gpu/pages.py."""

    def copy(self, pages: Sequence[int]) -> Callable[[], Sequence[Sequence[bytes | memoryview]]]:
        """Begin to copy these pages as they are now. What is returned waits for the copies, in any thread: the parts of each."""

    def fill(self) -> Filling:
        """Begin a transfer, whose pages no step uses that is launched from here on."""


class HostPages:
    """Pages on the host."""

    def __init__(self, rows: Rows, file_bytes: int) -> None:
        self._rows, self._buffer = rows, bytearray(file_bytes)

    def copy(self, pages: Sequence[int]) -> Callable[[], list[list[bytes]]]:
        rows = self._rows()
        copies = [[memory[page].tobytes() for memory in rows] for page in pages]
        return lambda: copies

    def fill(self) -> HostFilling:
        return HostFilling(self._rows(), self._buffer)


class HostFilling:
    """The thread that reads fills pages itself."""

    def __init__(self, rows: list[np.ndarray], buffer: bytearray) -> None:
        self._rows, self._buffer = rows, buffer
        self._lock = threading.Lock()
        self._is_over = False

    def room(self) -> bytearray:
        return self._buffer

    def put(self, page: int) -> bool:
        with self._lock:
            if self._is_over:
                return False
            at, data = 0, np.frombuffer(self._buffer, np.uint8)[HEADER_BYTES:]
            for memory in self._rows:
                memory[page] = data[at : at + memory.shape[1]]
                at += memory.shape[1]
            return True

    def look(self) -> bool:
        return True

    def stop(self) -> None:
        with self._lock:
            self._is_over = True


class Snapshots(NamedTuple):
    """The state pages of one rank, with files and receiver as those of blocks."""

    files: PageFiles | None
    memory: PageMemory
    receiver: Receiver | None = None


class RankTier:
    """The pages of one rank elsewhere. All methods belong to one thread."""

    def __init__(
        self, rank: int, files: PageFiles | None, memory: PageMemory, receiver: Receiver | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`files`: None without a disk tier. `receiver`: None in an engine that gets no blocks of others. `snapshots`: None without
        recurrent layers."""
        self._rank, self._files, self._memory, self._receiver = rank, files, memory, receiver
        self._snapshots = snapshots
        self._writer = ThreadPoolExecutor(1, "tier-write", yield_to_others)
        self._reader = ThreadPoolExecutor(1, "tier-read")
        self._fillings: dict[int, tuple[Filling, ...]] = {}
        self._futures: list[Future[BlocksWritten | BlocksRead]] = []
        self._tickets: dict[int, str] = {}
        self._has_warned, self._said = False, set[str]()

    def found(self) -> DiskFound:
        if self._files is None:
            return DiskFound(blocks=b"", file_bytes=0)
        found = DiskFound(blocks=_listed(self._files), file_bytes=self._files.file_bytes)
        files = self._snapshots and self._snapshots.files
        return found if files is None else replace(found, snapshots=_listed(files), snapshot_bytes=files.file_bytes)

    @property
    def is_busy(self) -> bool:
        """Whether `reports` has one to come."""
        return bool(self._futures)

    def reports(self) -> list[BlocksWritten | BlocksRead]:
        """What has been written and read since the last call."""
        for filling in self._moving():
            self._look(filling)
        done = [future for future in self._futures if future.done() and self._is_there(future.result())]
        self._futures = [future for future in self._futures if future not in done]
        return [future.result() for future in done]

    def _is_there(self, report: BlocksWritten | BlocksRead) -> bool:
        """Whether steps find what a report says."""
        fillings = self._fillings.get(report.transfer, ()) if isinstance(report, BlocksRead) else ()
        return all([self._look(filling) for filling in fillings])

    def _look(self, filling: Filling) -> bool:
        """As Filling.look; where memory lacks, the next look goes on."""
        try:
            return filling.look()
        except Exception as error:  # a device's libraries have errors of their own
            self._require_shortage(error, "A block waits on its way into the cache")
            return False

    def _moving(self) -> list[Filling]:
        return [filling for fillings in self._fillings.values() for filling in fillings]

    def store(self, request: StoreBlocks) -> None:
        """Copy these pages, and write them, but for those for whose copies memory lacks."""
        copies = []
        try:
            copies.append(self._memory.copy(request.pages))
            if self._snapshots is not None:
                copies.append(self._snapshots.memory.copy(request.state_pages))
        except Exception as error:  # as in _look
            self._require_shortage(error, "Blocks are not written to the disk tier, and serving goes on")
        self._futures.append(self._writer.submit(self._write, request, copies))

    def expect(self, request: FetchBlocks) -> None:
        """The blocks of the transfer that begins next are another engine's."""
        self._tickets[request.transfer] = request.ticket

    def fold(self, event: AnyEvent, state: State) -> None:
        """Do what an event asks for, which has led to `state`."""
        match event:
            case BlocksPromoted() if state.tier is not None:
                ticket, moving = self._tickets.pop(event.transfer, ""), state.tier.transfers[-1]
                behind = (self._snapshots.memory.fill(),) if self._snapshots is not None and moving.state >= 0 else ()
                self._fillings[event.transfer] = fillings = (self._memory.fill(), *behind)
                self._futures.append(self._reader.submit(self._read, moving, fillings, ticket))
            case PromotionEnded():
                for filling in self._fillings.pop(event.transfer):
                    filling.stop()
        if self._files is not None:
            self._change(event, self._files, TierChanged)
        if self._snapshots is not None and self._snapshots.files is not None:
            self._change(event, self._snapshots.files, SnapshotsChanged)

    def _change(self, event: AnyEvent, files: PageFiles, changed: type[TierChanged]) -> None:
        """Have files kept and removed as an event says."""
        match event:
            case TierOpened():
                known = frozenset(names_in(event.blocks if changed is TierChanged else event.snapshots))
                self._writer.submit(files.keep, known.__contains__)
            case TierChanged() if type(event) is changed:
                self._writer.submit(files.remove, names_in(event.gone))
                self._writer.submit(files.touch, names_in(event.kept))
            case PrefixCacheReset():
                self._writer.submit(files.keep, lambda name: False)

    def close(self) -> None:
        """End both threads, with what they have begun, and let another engine use the folder."""
        for filling in self._moving():
            filling.stop()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        for files in (self._files, self._snapshots and self._snapshots.files):
            if files is not None:
                files.close()

    def _write(self, request: StoreBlocks, copies: Sequence[Callable[[], Sequence[Sequence[bytes | memoryview]]]]) -> BlocksWritten:
        stored, behind = list[bytes](), list[bytes]()
        shelves = ((self._files, request.blocks, stored), (self._snapshots and self._snapshots.files, request.snapshots, behind))
        try:
            for (files, asked, written), copied in zip(shelves, copies):
                if files is None:
                    continue
                for name, parts in zip(names_in(asked), copied()):
                    files.write(name, parts)
                    written.append(name)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("The disk tier cannot write a block, tries on with the next, and serving goes on: %s", reason(error))
        return BlocksWritten(self._rank, request.blocks, b"".join(stored), request.snapshots, b"".join(behind))

    def _read(self, transfer: Transfer, fillings: tuple[Filling, ...], ticket: str) -> BlocksRead:
        if ticket:
            return self._receive(transfer, fillings, ticket)
        files, found = self._files, list[bytes]()
        if files is None:
            return BlocksRead(rank=self._rank, transfer=transfer.number, count=0)
        bad = self._fill(files, files, _blocks_of(transfer), fillings[0], found)
        files.touch(transfer.keys[transfer.hits :][: len(found)][::-1])
        files, behind = self._snapshots and self._snapshots.files, _snapshot_of(transfer)
        if files is not None and behind and len(found) == len(transfer.pages) - transfer.hits:
            bad = self._fill(files, files, behind, fillings[-1], found)
            files.touch(transfer.keys[-1:])
        return BlocksRead(rank=self._rank, transfer=transfer.number, count=len(found), bad=bad)

    def _receive(self, transfer: Transfer, fillings: tuple[Filling, ...], ticket: str) -> BlocksRead:
        found, wanted = list[bytes](), 0
        parts = ((self._receiver, _blocks_of(transfer)), (self._snapshots and self._snapshots.receiver, _snapshot_of(transfer)))
        try:
            for (receiver, pairs), filling in zip(parts, fillings):
                if receiver is None:
                    raise HandoverFailed("this engine gets no blocks of others")
                if not pairs or len(found) < wanted:
                    continue
                source, pages = receiver.source(ticket)
                with closing(source):
                    source.ask([name for name, _ in pairs])
                    self._fill(source, pages, pairs, filling, found)
                wanted += len(pairs)
        except HandoverFailed as error:
            self._say(f"A prompt is computed here too: {error}")
        return BlocksRead(rank=self._rank, transfer=transfer.number, count=len(found), checksums=b"".join(found))

    def _fill(
        self, source: BlockSource, pages: Pages, wanted: Sequence[tuple[bytes, int]], filling: Filling, found: list[bytes]
    ) -> bytes:
        """Fill pages with the blocks that are `wanted`, in order, as far as they are right; `found` gets their checksums. Returns
        the name of one that is not right, b"" if none."""
        for key, page in wanted:
            if (buffer := filling.room()) is None:
                break
            if not (source.fetch(key, buffer) and pages.is_right(key, buffer)):
                return key
            checksum = checksum_in(buffer)
            if not filling.put(page):
                break
            found.append(checksum)
        return b""

    def _require_shortage(self, error: Exception, what: str) -> None:
        """Warn of it, or raise any other error."""
        if not (why := shortage_of(error, self._rank)):
            raise error
        self._say(f"{what}: {why}")

    def _say(self, sentence: str) -> None:
        """Warn of something once."""
        if sentence not in self._said:
            self._said = {*list(self._said)[-SAID_MAX:], sentence}
            log.warning("%s", sentence)


def _blocks_of(transfer: Transfer) -> list[tuple[bytes, int]]:
    """The blocks that a transfer reads, each with its page."""
    return list(zip(transfer.keys[transfer.hits :], transfer.pages[transfer.hits :]))


def _snapshot_of(transfer: Transfer) -> list[tuple[bytes, int]]:
    """The snapshot that it reads behind them, by its block's name, with its page."""
    return [(transfer.keys[-1], transfer.state)] if transfer.state >= 0 else []


def _listed(files: PageFiles) -> bytes:
    return b"".join(name for _, name in files.list())


def yield_to_others() -> None:
    """Let steps have the cores first. On Linux a thread has a priority of its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
