"""The shared memory that the ranks of one machine exchange tensors through: its file, its layout, who may map it.

    header line: magic, version, world size, capacity, token, one-shot limit | two lines for each rank | set 0 | set 1
A set holds one slot of `capacity` bytes for each rank. Lines, slots and the operations on them: exchange_plain.py. The
file: shared_file.py. Each rank opens it itself and locks a byte of it, so that its end is noticed: ring_lives.py.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct

from vnext.runtime import shared_file
from vnext.runtime.exchange_plain import CAPACITY_MULTIPLE_BYTES, RANKS_MAX, PlainExchange, size_bytes
from vnext.runtime.futex import Futex, WaitMethod, choose_fence, choose_wait_method
from vnext.runtime.ring_lives import Lives

try:
    from vnext.runtime import _exchange
except ImportError:  # not built: no compiler when vnext was installed, or not Linux
    _exchange = None

_MAGIC = b"vnextexc"
_VERSION = 1
_TOKEN_BYTES = 8
_HEADER = struct.Struct(f"<8sIIQ{_TOKEN_BYTES}sQ")


class ExchangeFile:
    """The memory's file at the rank that makes it. `name` is what every rank opens it by."""

    def __init__(self, world_size: int, capacity_bytes: int, one_shot_bytes_max: int) -> None:
        """All reserved; the limit is for shared_group.py, told to all ranks. OSError for no room, ValueError for too
        many ranks."""
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
            said = f"no room for {size_bytes(world_size, capacity_bytes)} bytes of shared memory: {error.strerror}"
            raise OSError(error.errno, f"{said}; enlarge {shared_file.folder()} (docker: --shm-size)") from error
        finally:
            os.close(handle)
        self.name = f"{token.hex()} {self._path}"

    def unlink(self) -> None:
        """Let nobody else open it. Idempotent."""
        if self._is_linked:
            shared_file.unlink(self._path, self._door)
            self._is_linked = False


class Exchange:
    """One rank's mapping. `memory` does the work (see PlainExchange), `lives` knows which ranks are there."""

    def __init__(self, name: str, rank: int, waits: WaitMethod | None = None) -> None:
        """Map the file of that name. A way of sleeping asks for the plain form. FileNotFoundError, or ValueError for
        what is no such file or a rank that is taken."""
        token, _, path = name.partition(" ")
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            header = _read_header(self._handle, bytes.fromhex(token))
            self.world_size, self.capacity_bytes, self.one_shot_bytes_max = header
            self._mapping = mmap.mmap(self._handle, size_bytes(self.world_size, self.capacity_bytes))
            self.lives = Lives(self._handle)
            if not (0 <= rank < self.world_size and self.lives.claim(rank)):
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
    """What serves here: "compiled" or "plain"."""
    return "compiled" if _serves_compiled(choose_wait_method()) else "plain"


def _serves_compiled(waits: WaitMethod) -> bool:
    return _exchange is not None and isinstance(waits, Futex)


def _choose_memory(
    mapping: mmap.mmap, world_size: int, rank: int, capacity_bytes: int, waits: WaitMethod | None
) -> PlainExchange:
    if waits is None:
        waits = choose_wait_method()
        if _serves_compiled(waits):
            return _exchange.Exchange(mapping, world_size, rank, capacity_bytes)
    return PlainExchange(mapping, world_size, rank, capacity_bytes, waits, choose_fence())


def _read_header(handle: int, token: bytes) -> tuple[int, int, int]:
    """(world size, capacity, one-shot limit), the first two as the file's size confirms them."""
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
