"""Collectives over shared memory: the ranks of one machine sum and join their tensors with the fewest copies.

Owns the protocol; exchange_plain.py or its compiled implementation operates on the memory. A tensor goes in pieces of one slot.
For each piece every rank enters its part and then
    one-shot    adds all ranks' parts itself: one meeting, for small pieces
    two-shot    adds its share of the elements, and takes the other shares from the ranks that added them: two meetings
Either way an element is summed by one tree in float32 and rounded once: the same bits on every rank, in both forms, at any
speed. If a rank ends, for any reason, the others report it within LIVENESS_POLL_S.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vnext.base.compiled import load
from vnext.kernels.arrays import dtype_name, host_dtype
from vnext.runtime.processes import shared_file
from vnext.runtime.processes.futex import Futex, WaitMethod, choose_fence, choose_wait_method
from vnext.runtime.processes.shared_file import Liveness
from vnext.runtime.processes.thread_plan import ranks_spin_us
from vnext.runtime.transport.collectives.errors import GaveUp, RankLost
from vnext.runtime.transport.collectives.exchange_plain import (
    ADDED,
    ANY_KIND,
    CAPACITY_MULTIPLE_BYTES,
    LINE_BYTES,
    NOBODY,
    PAGE_BYTES,
    RANKS_MAX,
    SETS,
    PlainExchange,
    Rows,
    is_before,
    size_bytes,
)

if TYPE_CHECKING:
    import torch

CAPACITY_BYTES_DEFAULT = 2**20
ONE_SHOT_BYTES_MAX = {True: 2**14, False: 2**16}  # by whether ranks spin, measured: sleepers pay more for a second meeting
LIVENESS_POLL_S = 0.1
TIMEOUT_S = 3600.0  # for a rank that lives but does not come; the engine core's bound (progress.py) ends this earlier

GIVEN_UP = ANY_KIND + 1
"""The kind of an operation in which a rank takes no part."""
GAVE_UP = re.compile(rf"rank (\d+) with 0 of kind {GIVEN_UP}$")
_KINDS = {name: kind for kind, name in enumerate(ADDED)}
_ITEM_BYTES = tuple(host_dtype(name).itemsize for name in ADDED)
_TICKS_MASK = 0xFFFFFFFF
_NANOSECONDS = 1e9


def default_one_shot_bytes_max(world_size: int) -> int:
    """The largest piece that each rank adds by itself. Rank 0 decides, since ranks may see different cores."""
    return ONE_SHOT_BYTES_MAX[ranks_spin_us(world_size) > 0]


class SharedGroup:
    """One rank's collectives. Every rank calls the same ones in the same order with equal shapes; one thread uses it."""

    can_capture = False

    def __init__(self, exchange: Exchange, rank: int, spin_us: float | None = None) -> None:
        """Takes over the exchange."""
        self._exchange, self._memory = exchange, exchange.memory
        self._rank, self._world_size = rank, exchange.world_size
        self._capacity_bytes = exchange.capacity_bytes
        self._one_shot_bytes_max = exchange.one_shot_bytes_max
        self._spin_ns = int((ranks_spin_us(self._world_size) if spin_us is None else spin_us) * 1e3)
        self._operation = 0
        self._ticks = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks in the dtype of `tensor` (float32, bfloat16, float16), which is changed in place where it is
        contiguous. Raises RankLost, and ValueError where ranks came with different sizes."""
        total = tensor.contiguous()
        self.sum_at(dtype_name(tensor.dtype), total.data_ptr(), total.nbytes)
        return total

    def sum_at(self, dtype: str, at: int, size_bytes: int) -> None:
        """As all_reduce, in place, of `size_bytes` at this address."""
        if (kind := _KINDS.get(dtype)) is None:
            raise TypeError(f"{dtype} is not added over ranks; there are: {', '.join(ADDED)}")
        for done in range(0, size_bytes, self._capacity_bytes):
            self._reduce_piece(kind, at + done, min(size_bytes - done, self._capacity_bytes))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors of any dtype joined along `dim` in rank order. Raises as all_reduce does."""
        part = tensor.contiguous()
        shape = list(part.shape)
        row_bytes = part.itemsize
        for length in shape[dim % part.dim() :]:
            row_bytes *= length
        shape[dim] *= self._world_size
        joined = part.new_empty(shape)
        self.join_at(part.data_ptr(), joined.data_ptr(), part.nbytes, row_bytes)
        return joined

    def join_at(self, part: int, joined: int, size_bytes: int, row_bytes: int) -> None:
        """Join the rows of the ranks' parts, of `size_bytes` each at the address `part`, one beside the other at `joined`."""
        for done in range(0, size_bytes, self._capacity_bytes):
            self._gather_piece(part, joined, done, min(size_bytes - done, self._capacity_bytes), row_bytes)

    def agree(self) -> None:
        """Meet all ranks behind a step that this one has computed. Raises GaveUp, RankLost."""
        self._enter(ANY_KIND, 0, 0)

    def give_up(self) -> None:
        """In place of the next operation, tell the other ranks that this one lacks memory for it: they raise GaveUp there. Raises
        RankLost."""
        with suppress(GaveUp):
            self._enter(GIVEN_UP, 0, 0)

    def require_whole(self) -> None:
        """Does nothing: the collectives themselves have raised any error."""

    def ended(self) -> list[int]:
        """Other ranks that have ended or left the group."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return [rank for rank in others if not self._exchange.liveness.has_owner(rank)]

    def close(self) -> None:
        """Leave the group: ranks that wait for this one get RankLost. Idempotent."""
        self._exchange.close()

    def _reduce_piece(self, kind: int, address: int, size_bytes: int) -> None:
        item_bytes = _ITEM_BYTES[kind]
        count = size_bytes // item_bytes
        self._enter(kind, address, size_bytes)
        if size_bytes <= self._one_shot_bytes_max:
            self._memory.add(self._operation, kind, 0, count, address)
            return
        bounds = [count * rank // self._world_size for rank in range(self._world_size + 1)]
        shares = list(zip(bounds, bounds[1:]))
        start, stop = shares[self._rank]
        self._memory.add(self._operation, kind, start, stop - start, 0)
        self._ticks = self._ticks + 1 & _TICKS_MASK
        self._memory.tick(self._ticks)
        self._meet(kind, size_bytes)
        row = Rows(address, size_bytes, size_bytes)
        for rank, (start, stop) in enumerate(shares):
            at, here_bytes = start * item_bytes, (stop - start) * item_bytes
            self._memory.take(self._operation, rank, at, here_bytes, at, row)

    def _gather_piece(self, source: int, target: int, done: int, size_bytes: int, row_bytes: int) -> None:
        self._enter(ANY_KIND, source + done, size_bytes)
        for rank in range(self._world_size):
            rows = Rows(target + rank * row_bytes, row_bytes, row_bytes * self._world_size)
            self._memory.take(self._operation, rank, 0, size_bytes, done, rows)

    def _enter(self, kind: int, address: int, size_bytes: int) -> None:
        """Begin the next operation and wait until every rank has entered it."""
        self._operation += 1
        self._ticks = self._ticks + 1 & _TICKS_MASK
        self._memory.enter(self._operation, self._ticks, kind, address, size_bytes)
        try:
            self._meet(kind, size_bytes)
        except ValueError as error:  # the tickets of this operation differ
            if (who := GAVE_UP.search(str(error))) is None and kind != GIVEN_UP:
                raise
            raise GaveUp(f"rank {who[1] if who else self._rank} lacks memory") from error

    def _meet(self, kind: int, size_bytes: int) -> None:
        """Wait until every rank has ticked as often as this one."""
        wait = (self._operation, self._ticks, kind, size_bytes)
        poll_ns = int(LIVENESS_POLL_S * _NANOSECONDS)
        if self._memory.await_all(*wait, self._spin_ns, poll_ns) == NOBODY:
            return
        waited_s = 0.0
        self._require_liveness()
        while (missing := self._memory.await_all(*wait, 0, poll_ns)) != NOBODY:
            self._require_liveness()
            waited_s += LIVENESS_POLL_S  # no clock: time during which this rank itself was stopped does not count
            if waited_s > TIMEOUT_S:
                raise RankLost(f"rank {missing} did not come within {TIMEOUT_S:.0f} s; is it stuck?")

    def _require_liveness(self) -> None:
        """Raise RankLost for ranks that ended before they ticked. Reads a rank's end first, then its last tick."""
        lost = [rank for rank in self.ended() if is_before(self._memory.ticks(rank), self._ticks)]
        if lost:
            raise RankLost(f"rank {lost[0]} has ended or left the group before all ranks had met")


# ---- the memory of an exchange -----------------------------------------------------------------------------------
# The shared memory through which the ranks of one machine exchange tensors: its file, its layout, and opening it.
#
#     header line: magic, version, world size, capacity, token, one-shot limit | two lines for each rank | set 0 | set 1
# A set holds one slot of `capacity` bytes for each rank. Lines, slots and the operations on them: exchange_plain.py. The
# file: shared_file.py. Each rank opens it itself and locks a byte of it, so that its end is noticed.

_exchange = load(
    "vnext.runtime.transport.collectives._exchange",
    {
        "LINE_BYTES": LINE_BYTES, "PAGE_BYTES": PAGE_BYTES, "SETS": SETS, "NOBODY": NOBODY, "RANKS_MAX": RANKS_MAX,
        **{name.upper(): kind for kind, name in enumerate(ADDED)},
    },
)  # fmt: skip
_MAGIC = b"vnextexc"
_VERSION = 1
_TOKEN_BYTES = 8
_HEADER = struct.Struct(f"<8sIIQ{_TOKEN_BYTES}sQ")


class ExchangeFile:
    """The memory's file at the rank that makes it. Every rank opens it by `name`."""

    def __init__(self, world_size: int, capacity_bytes: int, one_shot_bytes_max: int) -> None:
        """Reserves the whole file. The limit is for shared_group.py and stored for all ranks. Raises OSError without room,
        ValueError for too many ranks."""
        if not 1 <= world_size <= RANKS_MAX:
            raise ValueError(f"{world_size} ranks: shared memory serves 1 to {RANKS_MAX}")
        capacity_bytes = -(-capacity_bytes // CAPACITY_MULTIPLE_BYTES) * CAPACITY_MULTIPLE_BYTES
        self._path, handle, self._door = shared_file.create_file("exchange")
        self._is_linked = True
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            shared_file.reserve(handle, size_bytes(world_size, capacity_bytes))
            header = _HEADER.pack(_MAGIC, _VERSION, world_size, capacity_bytes, token, one_shot_bytes_max)
            os.pwrite(handle, header, 0)
        except OSError as error:
            self.unlink()
            message = f"no room for {size_bytes(world_size, capacity_bytes)} bytes of shared memory: {error.strerror}"
            raise OSError(error.errno, f"{message}; enlarge {shared_file.folder()} (docker: --shm-size)") from error
        finally:
            os.close(handle)
        self.name = f"{token.hex()} {self._path}"

    def unlink(self) -> None:
        """Prevent further opens. Idempotent."""
        if self._is_linked:
            shared_file.unlink(self._path, self._door)
            self._is_linked = False


class Exchange:
    """One rank's mapping. `memory` does the work (see PlainExchange); `liveness` knows which ranks are alive."""

    def __init__(self, name: str, rank: int, waits: WaitMethod | None = None) -> None:
        """Map the file of that name. A way of sleeping selects the plain implementation. Raises FileNotFoundError, or
        ValueError for a file that is no exchange or a rank that is taken."""
        token, _, path = name.partition(" ")
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = _read_header(self._handle, bytes.fromhex(token))
            self.world_size, self.capacity_bytes, self.one_shot_bytes_max = header
            self._mapping = mmap.mmap(self._handle, size_bytes(self.world_size, self.capacity_bytes))
            self.liveness = Liveness(self._handle)
            if not (0 <= rank < self.world_size and self.liveness.claim(rank)):
                raise ValueError(f"rank {rank} of {self.world_size} is taken or does not exist")
        except (OSError, ValueError):
            os.close(self._handle)
            raise
        self.memory = _choose_memory(self._mapping, self.world_size, rank, self.capacity_bytes, waits)

    def close(self) -> None:
        """Unmap, and let the others know that this rank has left. Idempotent."""
        if not self._mapping.closed:
            self.memory.release()
            self._mapping.close()
            os.close(self._handle)


def implementation() -> str:
    """The implementation in use on this machine: "compiled" or "plain"."""
    return "compiled" if _compiled(choose_wait_method()) else "plain"


def _compiled(waits: WaitMethod) -> Any:
    """The compiled module where it serves, else None."""
    return _exchange if isinstance(waits, Futex) else None


def _choose_memory(
    mapping: mmap.mmap, world_size: int, rank: int, capacity_bytes: int, waits: WaitMethod | None
) -> PlainExchange:
    if waits is None:
        waits = choose_wait_method()
        if (compiled := _compiled(waits)) is not None:
            exchange: PlainExchange = compiled.Exchange(mapping, world_size, rank, capacity_bytes)
            return exchange
    return PlainExchange(mapping, world_size, rank, capacity_bytes, waits, choose_fence())


def _read_header(handle: int, token: bytes) -> tuple[int, int, int]:
    """(world size, capacity, one-shot limit), the first two checked against the file's size."""
    status = os.fstat(handle)
    head = os.pread(handle, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    if len(head) < _HEADER.size:
        raise ValueError("not the ranks' shared memory: no file, or too short")
    magic, version, world_size, capacity_bytes, found, one_shot_bytes_max = _HEADER.unpack(head)
    if (magic, version, found) != (_MAGIC, _VERSION, token):
        raise ValueError("not the ranks' shared memory: are all ranks on one machine, from one vnext release?")
    is_capacity = capacity_bytes >= CAPACITY_MULTIPLE_BYTES and capacity_bytes % CAPACITY_MULTIPLE_BYTES == 0
    if not (1 <= world_size <= RANKS_MAX and is_capacity) or status.st_size != size_bytes(world_size, capacity_bytes):
        raise ValueError(f"broken shared memory: {world_size} ranks, {capacity_bytes} bytes, a file of {status.st_size}")
    return world_size, capacity_bytes, one_shot_bytes_max
