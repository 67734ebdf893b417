"""The shared memory through which the ranks of one machine exchange tensors: its file, its layout, and opening it.

    header line: magic, version, world size, capacity, token, one-shot limit | two lines for each rank | set 0 | set 1
A set holds one slot of `capacity` bytes for each rank. Lines, slots and the operations on them: exchange_plain.py. The
file: shared_file.py. Each rank opens it itself and locks a byte of it, so that its end is noticed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
from typing import Any

from vnext.base.compiled import load
from vnext.runtime.processes import shared_file
from vnext.runtime.processes.futex import Futex, WaitMethod, choose_fence, choose_wait_method
from vnext.runtime.processes.shared_file import Liveness
from vnext.runtime.transport.collectives.exchange_plain import (
    ADDED,
    CAPACITY_MULTIPLE_BYTES,
    LINE_BYTES,
    NOBODY,
    PAGE_BYTES,
    RANKS_MAX,
    SETS,
    PlainExchange,
    size_bytes,
)

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
