"""The disk tier of one rank: pages are written and read beside the running steps.

A page to be written is copied between two steps, and its file is written by a thread of its own; the engine core asks for few at a
time, which bounds the copies. A page that comes back is read and checked by another thread, which fills it while no step knows it.
Decides nothing: what is written, read and removed stands in messages and events.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from vnext.runtime.messages import BlocksRead, BlocksWritten, DiskFound
from vnext.runtime.rank.page_files import HEADER_BYTES, PageFiles
from vnext.runtime.ring.broadcast import StoreBlocks
from vnext.state.events import AnyEvent, BlocksPromoted, PrefixCacheReset, PromotionEnded, TierChanged, TierOpened
from vnext.state.state import State, Transfer
from vnext.state.tier import names_in

WRITER_NICENESS = 10
Rows = Callable[[], list[np.ndarray]]
"""The memory of all pages: uint8 [page_count, bytes] each."""
log = logging.getLogger(__name__)


class Reading:
    """A transfer while its thread fills pages. `stop` returns when it fills none any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def stop(self) -> None:
        with self._lock:
            self._is_over = True

    def put(self, rows: list[np.ndarray], page: int, data: np.ndarray) -> bool:
        """Fill a page; False if the transfer is over."""
        with self._lock:
            if self._is_over:
                return False
            at = 0
            for memory in rows:
                memory[page] = data[at : at + memory.shape[1]]
                at += memory.shape[1]
            return True


class RankTier:
    """The pages of one rank on disk. All methods belong to one thread."""

    def __init__(self, rank: int, files: PageFiles, rows: Rows) -> None:
        self._rank, self.files, self._rows = rank, files, rows
        self._writer = ThreadPoolExecutor(1, "tier-write", _yield_to_others)
        self._reader = ThreadPoolExecutor(1, "tier-read")
        self._readings: dict[int, Reading] = {}
        self._futures: list[Future[BlocksWritten | BlocksRead]] = []
        self._buffer = bytearray(files.file_bytes)
        self._has_warned = False

    def found(self) -> DiskFound:
        """What is on disk."""
        return DiskFound(blocks=b"".join(name for _, name in self.files.list()), file_bytes=self.files.file_bytes)

    @property
    def is_busy(self) -> bool:
        """Whether `reports` has one to come."""
        return bool(self._futures)

    def reports(self) -> list[BlocksWritten | BlocksRead]:
        """What has been written and read since the last call."""
        done = [future for future in self._futures if future.done()]
        self._futures = [future for future in self._futures if future not in done]
        return [future.result() for future in done]

    def store(self, wish: StoreBlocks) -> None:
        """Copy these pages, and write them."""
        rows, names = self._rows(), names_in(wish.blocks)
        copies = [[memory[page].tobytes() for memory in rows] for page in wish.pages]
        self._futures.append(self._writer.submit(self._write, wish.blocks, names, copies))

    def fold(self, event: AnyEvent, state: State) -> None:
        """Do what an event asks for, which has led to `state`."""
        match event:
            case TierOpened():
                known = frozenset(names_in(event.blocks))
                self._writer.submit(self.files.keep, known.__contains__)
            case TierChanged():
                self._writer.submit(self.files.remove, names_in(event.gone))
                self._writer.submit(self.files.touch, names_in(event.kept))
            case PrefixCacheReset():
                self._writer.submit(self.files.keep, lambda name: False)
            case BlocksPromoted() if state.tier is not None:
                self._readings[event.transfer] = reading = Reading()
                self._futures.append(self._reader.submit(self._read, state.tier.transfers[-1], reading, self._rows()))
            case PromotionEnded():
                self._readings.pop(event.transfer).stop()

    def close(self) -> None:
        """End both threads, with what they have begun, and let another engine use the folder."""
        for reading in self._readings.values():
            reading.stop()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.files.close()

    def _write(self, asked: bytes, names: tuple[bytes, ...], copies: list[list[bytes]]) -> BlocksWritten:
        stored = []
        try:
            for name, parts in zip(names, copies):
                self.files.write(name, parts)
                stored.append(name)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("The disk tier writes no more blocks, and serving goes on: %s", error)
        return BlocksWritten(rank=self._rank, blocks=asked, stored=b"".join(stored))

    def _read(self, transfer: Transfer, reading: Reading, rows: list[np.ndarray]) -> BlocksRead:
        count, bad, data = 0, b"", np.frombuffer(self._buffer, np.uint8)[HEADER_BYTES:]
        keys = transfer.keys[transfer.hits :]
        for key, page in zip(keys, transfer.pages[transfer.hits :]):
            if not self.files.read(key, self._buffer):
                bad = key
                break
            if not reading.put(rows, page, data):
                break
            count += 1
        self.files.touch(keys[:count][::-1])
        return BlocksRead(rank=self._rank, transfer=transfer.number, count=count, bad=bad)


def _yield_to_others() -> None:
    """Let steps have the cores first. On Linux a thread has a priority of its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
