"""Ranks whose GPU is the host shim: their memory, their groups, and ranks as threads of one process.

The call sites are the product's: handles go through a store, tensors through DeviceGroup and the launchers.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from host_shim import HostBackend, HostKernel
from rank_sums import same_bits, tree_sum, values

from vnext.kernels.cuda.exchange import SIGNALS_BYTES, SUMMED, WATCH_WORDS
from vnext.kernels.cuda.interface import Defines
from vnext.runtime.processes import shared_file
from vnext.runtime.transport.collectives.choose_collectives import MakeMemory, choose_device_group
from vnext.runtime.transport.collectives.cpu_collectives import choose_group
from vnext.runtime.transport.collectives.device_group import DeviceGroup, Limits

LIMITS = Limits(capacity_bytes=2**15, one_shot_bytes_max=2**14, timeout_ms=60_000)
COUNTS = (1, 3, 8, 9, 257, 1021, 3001, 5003, 9001)
"""Elements: of one chunk or less, one-shot and two-shot of several blocks, and of two pieces in float32."""
FIRST_SLOT_BYTES = SIGNALS_BYTES


class HeapMemory:
    """DeviceMemory within one process: a handle is an address. Exactly as large as asked for, for AddressSanitizer."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = torch.zeros(size_bytes, dtype=torch.uint8)
        self._watch = torch.zeros(WATCH_WORDS, dtype=torch.int32)
        self.address, self.watch_address = self._bytes.data_ptr(), self._watch.data_ptr()
        self._bytes[FIRST_SLOT_BYTES:] = 0xFF  # what nobody has written is no number
        self.handle = self.address.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.address = self.watch_address = 0


class FileMemory:
    """DeviceMemory over shared files: a handle is a name."""

    def __init__(self, size_bytes: int) -> None:
        self._maps: list[mmap.mmap] = []
        self._name, handle, self._door = shared_file.create_file("device")
        shared_file.reserve(handle, size_bytes)
        self.address = self._map(handle)
        ctypes.memset(self.address + FIRST_SLOT_BYTES, 0xFF, size_bytes - FIRST_SLOT_BYTES)
        self._watch = (ctypes.c_uint32 * WATCH_WORDS)()
        self.watch_address = ctypes.addressof(self._watch)
        self.handle = self._name.encode()

    def open(self, handle: bytes) -> int:
        return self._map(os.open(handle.decode(), os.O_RDWR | os.O_CLOEXEC))

    def _map(self, handle: int) -> int:
        self._maps.append(mmap.mmap(handle, 0))
        os.close(handle)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.address = self.watch_address = 0  # mapped until the process ends: addresses of it are about


class RankBackend(HostBackend):
    """A backend with an order of its own for each thread, which is a rank."""

    _own = threading.local()
    _builds = threading.Lock()

    def kernel(self, source: str, name: str, defines: Defines) -> HostKernel:
        with self._builds:
            return super().kernel(source, name, defines)

    @property
    def order(self) -> int:
        return getattr(self._own, "order", 0)

    @order.setter
    def order(self, order: int) -> None:
        self._own.order = order


def join(
    store: dist.Store, rank: int, world_size: int, limits: Limits = LIMITS, make_memory: MakeMemory = FileMemory
) -> DeviceGroup:
    """This rank's group, met as at start-up."""
    host = choose_group(store, rank, world_size, lambda: store)
    return choose_device_group(store, rank, world_size, torch.device("cpu"), host, limits, make_memory)


def run_threads(
    backend: RankBackend, orders: Sequence[int], work: Callable[[int, DeviceGroup], Any], limits: Limits = LIMITS
) -> list[Any]:
    """`work(rank, group)` on a thread for each of the ranks' orders; what they returned."""
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        backend.order = orders[rank]
        group = join(store, rank, len(orders), limits, HeapMemory)
        try:
            return work(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(len(orders)) as threads:
        return list(threads.map(rank_main, range(len(orders))))


# ---- numbers -----------------------------------------------------------------------------------------------------


def wrong_sums(
    group: DeviceGroup, rank: int, world_size: int, dtypes: Sequence[torch.dtype] = SUMMED, counts: Sequence[int] = COUNTS
) -> list[tuple[int, str]]:
    """The cases whose sum has other bits than the sum in rank order; launched back to back, each of them whole."""
    cases = [(case, count, dtype) for case, (dtype, count) in enumerate(itertools.product(dtypes, counts))]
    given = [values(case, rank, count, dtype) for case, count, dtype in cases]
    sums = []
    for tensor in given:
        sums.append(group.all_reduce(tensor))
        group.require_whole()
    return [
        (count, str(dtype))
        for found, (case, count, dtype) in zip(sums, cases, strict=True)
        if not same_bits(found, tree_sum(case, world_size, count, dtype))
    ]


def wrong_joins(group: DeviceGroup, rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """The shapes and dimensions that were joined otherwise than torch.cat would."""
    shapes = [((7,), 0), ((3, 5), 0), ((3, 5), 1), ((2, 700), -1), ((64, 16), 1), ((2, 3, 4), 1), ((0, 3), 0)]
    wrong = []
    for case, (shape, dim) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            parts = [values(case, each, 1400, torch.float32).abs().to(dtype) for each in range(world_size)]
            parts = [part[: torch.Size(shape).numel()].view(shape) for part in parts]
            joined = group.all_gather(parts[rank], dim)
            group.require_whole()
            if not torch.equal(joined, torch.cat(parts, dim)):
                wrong.append((shape, dim, str(dtype)))
    return wrong
