"""The operations on the memory through which ranks exchange tensors, in numpy: the oracle of _exchange.c, and the
implementation where that was not built.

Owns ticks, tickets and slots as shared_group.py lays them out; knows no files, and its caller's tensors only by address.
Each rank writes only its own line and slots. Memory order: data and ticket before ticks. x86 guarantees this for aligned
stores; elsewhere a fence stands between (futex.choose_fence). A wake follows every tick.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vnext.kernels.arrays import host_dtype
from vnext.kernels.shards import joined
from vnext.runtime.processes.futex import WaitMethod

LINE_BYTES = 128  # two cache lines, because processors fetch pairs
PAGE_BYTES = 4096
SETS = 2
NOBODY = -1
RANKS_MAX = 64
CAPACITY_MULTIPLE_BYTES = 64
ADDED = ("float32", "bfloat16", "float16")  # the index is the kind of a ticket
ANY_KIND = len(ADDED)  # bytes that are only taken, never added

_TICKETS_OFFSET = 16
_TICKET = struct.Struct("<QII")
_TICKS_MASK = 0xFFFFFFFF
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


class Rows(NamedTuple):
    """Rows of `size` bytes that lie `stride` bytes apart from `address` on."""

    address: int
    size: int
    stride: int


class PlainExchange:
    """The lines and slots of one mapped exchange as `rank` of `world_size` uses them; used by one thread.

    `operation` counts operations, `ticks` counts their phases (modulo 2**32). An operation's slots are reused two operations
    later: a rank that has begun the next operation has read all of the one before. A released exchange raises ValueError.
    """

    def __init__(
        self,
        buffer: mmap.mmap | bytearray,
        world_size: int,
        rank: int,
        capacity_bytes: int,
        waits: WaitMethod,
        fence: Callable[[], None],
    ) -> None:
        view = memoryview(buffer)
        is_sized = 0 <= rank < world_size <= RANKS_MAX and capacity_bytes >= CAPACITY_MULTIPLE_BYTES
        if not is_sized or capacity_bytes % CAPACITY_MULTIPLE_BYTES or len(view) != size_bytes(world_size, capacity_bytes):
            raise ValueError("the buffer has another size than its ranks and its capacity")
        self._world_size, self._rank, self._capacity_bytes = world_size, rank, capacity_bytes
        self._view = view
        self._ticks = [ctypes.c_uint32.from_buffer(buffer, line_offset(each)) for each in range(world_size)]
        self._waits, self._fence = waits, fence

    def enter(self, operation: int, ticks: int, kind: int, address: int, count_bytes: int) -> None:
        """Copy `count_bytes` from `address` into this rank's slot, note them in its ticket, tick."""
        slot = self._slot(operation, self._rank, 0, count_bytes)
        slot[:] = memoryview((ctypes.c_char * count_bytes).from_address(address)).cast("B")
        _TICKET.pack_into(self._view, self._ticket_offset(operation, self._rank), count_bytes, kind, 0)
        self.tick(ticks)

    def tick(self, ticks: int) -> None:
        """Signal that this rank is one phase further."""
        self._require_open()
        self._fence()
        word = self._ticks[self._rank]
        word.value = ticks
        self._waits.wake(ctypes.addressof(word))

    def await_all(self, operation: int, ticks: int, kind: int, count_bytes: int, spin_ns: int, timeout_ns: int) -> int:
        """Spin, then sleep, until every rank has reached `ticks`. Returns NOBODY, or the first missing rank when time is over
        or a signal has come. Raises ValueError where the ranks' tickets of this operation differ."""
        self._require_open()
        begin_ns = time.monotonic_ns()
        for rank, word in enumerate(self._ticks):
            while is_before(seen := word.value, ticks):
                if (passed_ns := time.monotonic_ns() - begin_ns) >= timeout_ns:
                    return rank
                if passed_ns < spin_ns:
                    _give_way()
                else:
                    self._waits.wait(ctypes.addressof(word), seen, (timeout_ns - passed_ns) * 1e-9)
        self._fence()
        self._require_agreement(operation, kind, count_bytes)
        return NOBODY

    def ticks(self, rank: int) -> int:
        """The phase that a rank has reached."""
        self._require_open()
        if not 0 <= rank < self._world_size:
            raise ValueError(f"there is no rank {rank}")
        ticks = self._ticks[rank].value
        self._fence()
        return ticks

    def add(self, operation: int, kind: int, start: int, count: int, address: int) -> None:
        """Sum elements [start, start + count) by one tree (kernels/shards.py) in float32, round once to their type, and store them
        at `address`; if that is 0, at the same position of this rank's own slot."""
        if not 0 <= kind < len(ADDED):
            raise ValueError(f"kind {kind} cannot be added")
        dtype = host_dtype(ADDED[kind])
        size = dtype.itemsize
        slots = [self._slot(operation, rank, start * size, count * size) for rank in range(self._world_size)]
        if count == 0:
            return
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and what is no number are results
            rounded = joined([np.frombuffer(slot, dtype).astype(np.float32) for slot in slots]).astype(dtype)
        own = slots[self._rank]
        target = memoryview((ctypes.c_char * (count * size)).from_address(address)) if address else own
        np.frombuffer(target, dtype)[:] = rounded

    def take(self, operation: int, rank: int, start: int, count_bytes: int, first: int, rows: Rows) -> None:
        """Copy bytes [start, start + count) of a rank's slot to `rows`; the first copied byte is byte `first` of these."""
        source = self._slot(operation, rank, start, count_bytes)
        if not 0 <= rank < self._world_size or rows.size < 1:
            raise ValueError(f"no rank {rank}, or empty rows")
        done = 0
        while done < count_bytes:
            index, inside = divmod(first + done, rows.size)
            here = min(rows.size - inside, count_bytes - done)
            target = (ctypes.c_char * here).from_address(rows.address + index * rows.stride + inside)
            memoryview(target).cast("B")[:] = source[done : done + here]
            done += here

    def release(self) -> None:
        """Give the buffer back, so that the mapping can be closed. Idempotent."""
        self._ticks = []
        self._view.release()

    def _slot(self, operation: int, rank: int, start: int, count_bytes: int) -> memoryview:
        self._require_open()
        if start < 0 or count_bytes < 0 or start + count_bytes > self._capacity_bytes:
            raise ValueError(f"{count_bytes} bytes at {start} do not fit a slot of {self._capacity_bytes} bytes")
        number = operation % SETS * self._world_size + rank
        begin = data_offset(self._world_size) + number * self._capacity_bytes + start
        return self._view[begin : begin + count_bytes]

    def _ticket_offset(self, operation: int, rank: int) -> int:
        return line_offset(rank) + _TICKETS_OFFSET + operation % SETS * _TICKET.size

    def _require_agreement(self, operation: int, kind: int, count_bytes: int) -> None:
        for rank in range(self._world_size):
            found_bytes, found_kind, _ = _TICKET.unpack_from(self._view, self._ticket_offset(operation, rank))
            if (found_bytes, found_kind) != (count_bytes, kind):
                ours = f"rank {self._rank} came with {count_bytes} bytes of kind {kind}"
                other = f"rank {rank} with {found_bytes} of kind {found_kind}"
                raise ValueError(f"the ranks are out of step: {ours}, {other}")

    def _require_open(self) -> None:
        if not self._ticks:
            raise ValueError("the exchange's memory was released")


def line_offset(rank: int) -> int:
    """Where a rank's two lines begin: its ticks and tickets, then the word that shows whether it sleeps."""
    return LINE_BYTES * (1 + 2 * rank)


def data_offset(world_size: int) -> int:
    """Where the slots begin: SETS sets, in each one slot a rank."""
    return -(-line_offset(world_size) // PAGE_BYTES) * PAGE_BYTES


def size_bytes(world_size: int, capacity_bytes: int) -> int:
    """Size of the whole memory."""
    return data_offset(world_size) + SETS * world_size * capacity_bytes


def is_before(ticks: int, wanted: int) -> bool:
    """Whether a rank has not reached `wanted`. Counters wrap at 2**32; no two ranks are half of that apart."""
    return (ticks - wanted & _TICKS_MASK) >> 31 == 1
