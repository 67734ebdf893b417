"""Pages of a device's caches, for a tier: gathered to the host between two steps, and filled from files beside the steps.

Owns the buffers of the way in: files lie in rows of pinned memory, and a second copy on the device spreads their pages over the
layers' caches. No step waits, and no page is touched at the wrong time, by three orders:

    out    a copy is part of the work, so it comes after the steps before it and before those that use its pages again
    in     copies begin once the work that was requested before the transfer is done: it may read what the pages held
    after  all work behind the end of a transfer is ordered after its copies, also where it was given up and its pages are freed

Caches are written in place: graphs know their addresses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from vnext.models.layers.kv_cache import KvCache
from vnext.runtime.gpu.device import Device, Mark

ROWS = 16
"""Files that are on their way in at once."""
LOOK_S = 1e-3
ROOM_WAIT_S = 10.0
"""A rank that takes no file for so long has ended, or its transfer is given up by then (runtime/engine/tiers.py)."""


class DevicePages:
    """The pages of one rank, over all its caches. One thread, but for what says otherwise."""

    def __init__(self, device: Device, header_bytes: int, page_bytes: int) -> None:
        """`header_bytes`: of a file, before its page."""
        self._device, self._header_bytes = device, header_bytes
        size = header_bytes + page_bytes
        self._host = device.host_buffer(ROWS * size).view(ROWS, size)
        self._here = torch.empty((ROWS, page_bytes), dtype=torch.uint8, device=device.torch_device)
        self._buffers = [memoryview(row) for row in self._host.numpy()]
        self._free: SimpleQueue[int] = SimpleQueue()
        self.give_back(range(ROWS))
        self._reading: int | None = None  # the reader's alone
        self._lent: deque[tuple[Mark, Sequence[int]]] = deque()
        self._caches: list[torch.Tensor] = []

    def use(self, caches: Sequence[KvCache]) -> None:
        """These have the pages, under one number each: keys and values of each layer, [page_count, ...] and dense."""
        flat = [each.view(each.shape[0], -1).view(torch.uint8) for cache in caches for pair in cache for each in pair]
        word = torch.uint8 if any(each.shape[1] % 8 for each in flat) else torch.int64
        self._caches = [each.view(word) for each in flat]

    def copy(self, pages: Sequence[int]) -> Callable[[], list[list[memoryview]]]:
        """Begin to copy these pages as they are now. What is returned waits for the copies, in any thread: the parts of each."""
        at = self._device.upload(torch.tensor(pages))
        gathered = torch.cat([cache.index_select(0, at) for cache in self._caches], 1)
        (copied,), mark = self._device.fetch([gathered])

        def parts() -> list[list[memoryview]]:
            while not mark.is_reached():
                time.sleep(LOOK_S)
            return [[memoryview(row).cast("B")] for row in copied.numpy()]

        return parts

    def fill(self) -> DeviceFilling:
        """Begin a transfer, whose pages nothing uses that is requested from here on."""
        return DeviceFilling(self, self._device.mark())

    def room(self, timeout_s: float) -> memoryview:
        """For the reader: a row for the next file. Raises queue.Empty."""
        if self._reading is None:
            self._reading = self._free.get(timeout=timeout_s)
        return self._buffers[self._reading]

    def take(self) -> int:
        """For the reader: the row of the last `room`, which has its file."""
        assert self._reading is not None, "the reader has a row"
        row, self._reading = self._reading, None
        return row

    def give_back(self, rows: Sequence[int]) -> None:
        """These rows may be written."""
        for row in rows:
            self._free.put(row)

    def recycle(self) -> None:
        """Give back the rows whose copies are done."""
        while self._lent and self._lent[0][0].is_reached():
            self.give_back(self._lent.popleft()[1])

    def send(self, pages: Sequence[int], rows: Sequence[int], after: Mark) -> Mark:
        """Begin to fill these pages from the files in the rows, once `after` is reached."""

        def copy() -> None:
            for place, row in enumerate(rows):
                self._here[place].copy_(self._host[row, self._header_bytes :], non_blocking=True)
            at, begin = self._device.upload(torch.tensor(pages)), 0
            for cache in self._caches:
                end = begin + cache.shape[1]
                cache.index_copy_(0, at, self._here.view(cache.dtype)[: len(rows), begin:end])
                begin = end

        mark = self._device.beside(copy, after)
        self._lent.append((mark, rows))
        return mark

    def join(self, mark: Mark) -> None:
        """Order all later work after these copies."""
        self._device.join(mark)


class DeviceFilling:
    """The pages of one transfer. `room` and `put` belong to the thread that reads, the rest to the rank's."""

    def __init__(self, pages: DevicePages, began: Mark) -> None:
        self._pages, self._began = pages, began
        self._lock = threading.Lock()
        self._is_over = False
        self._put: list[tuple[int, int]] = []  # (page, row) of files that were read and not sent
        self._sent: Mark | None = None

    def room(self) -> memoryview | None:
        """Memory for the next file. Waits; None if the transfer is over."""
        end_s = time.monotonic() + ROOM_WAIT_S
        while not self._is_over and time.monotonic() < end_s:
            with suppress(Empty):
                return self._pages.room(LOOK_S)
        return None

    def put(self, page: int) -> bool:
        """Have a page filled from the file in the last `room`; False if the transfer is over."""
        with self._lock:
            if not self._is_over:
                self._put.append((page, self._pages.take()))
            return not self._is_over

    def look(self) -> bool:
        """Send what has been read; whether that is all, and steps that are launched behind `stop` read it. What could not be sent,
        because memory lacked, is sent by the next look."""
        self._pages.recycle()
        if not self._put or not self._began.is_reached():
            return not self._put
        pages, rows = zip(*self._put)
        self._sent = self._pages.send(pages, rows, self._began)
        with self._lock:
            del self._put[: len(pages)]
        return True

    def stop(self) -> None:
        """Fill no page from here on."""
        with self._lock:
            self._is_over = True
        self._pages.give_back([row for _, row in self._taken()])
        if self._sent is not None:
            self._pages.join(self._sent)

    def _taken(self) -> list[tuple[int, int]]:
        with self._lock:
            taken, self._put = self._put, []
        return taken
