"""The shared memory of one ring: its file, its layout, and opening it. Knows positions and bytes, no messages.

    header line: magic, version, reader count, capacity | the writer's line | a line for each reader | data
One process alone writes a line: a position, which counts bytes since the start and never wraps, and a signal word, which changes
with every publish and holds the owner's presence in its low bits. shared_file.py makes the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from typing import Any, Self

from vnext.base.compiled import load
from vnext.runtime.processes import shared_file
from vnext.runtime.processes.futex import Futex, WaitMethod, choose_fence, choose_wait_method
from vnext.runtime.processes.shared_file import Liveness
from vnext.runtime.transport.ring.memory_plain import (
    ALIGNMENT_BYTES,
    HEAD_BYTES,
    HEAD_MARK,
    LINE_BYTES,
    PlainMemory,
    Presence,
)

_ring = load(
    "vnext.runtime.transport.ring._ring",
    {
        "LINE_BYTES": LINE_BYTES, "HEAD_BYTES": HEAD_BYTES, "ALIGNMENT": ALIGNMENT_BYTES, "HEAD_MARK": HEAD_MARK,
        "ATTACHED": Presence.ATTACHED, "GONE": Presence.GONE,
    },
)  # fmt: skip
WRITER = 0  # the writer's line; reader i has line 1 + i
CAPACITY_BYTES_MIN = 64
CAPACITY_MULTIPLE_BYTES = 16  # so that half the capacity is aligned too

_MAGIC = b"vnextrng"
_VERSION = 2
_HEADER = struct.Struct("<8sIIQ")


class Segment:
    """One end's view of a ring's memory. The other ends open it by `name`.

    `memory` does the frequent operations (see PlainMemory); `liveness` knows which ends are alive.
    """

    def __init__(self, name: str, handle: int, door: int | None, waits: WaitMethod | None) -> None:
        """Takes over both file descriptors; the name refers to `door`. Raises ValueError for a file that is no ring."""
        self.name = name
        self._handle, self._door = handle, door
        try:
            self.reader_count, self.capacity_bytes = _read_header(handle)
            self._mapping = mmap.mmap(handle, _size_bytes(self.reader_count, self.capacity_bytes))
        except (OSError, ValueError):
            os.close(handle)
            raise
        self.liveness = Liveness(handle)
        self.memory = _choose_memory(self._mapping, 1 + self.reader_count, self.capacity_bytes, waits)
        self.closed = False

    @classmethod
    def create(cls, capacity_bytes: int, reader_count: int, waits: WaitMethod | None) -> Self:
        """A new segment of at least `capacity_bytes`, fully reserved, with the writer's line claimed. OSError without room."""
        capacity_bytes = -(-capacity_bytes // CAPACITY_MULTIPLE_BYTES) * CAPACITY_MULTIPLE_BYTES
        name, handle, door = shared_file.create_file("ring")
        try:
            shared_file.reserve(handle, _size_bytes(reader_count, capacity_bytes))
            os.pwrite(handle, _HEADER.pack(_MAGIC, _VERSION, reader_count, capacity_bytes), 0)
        except OSError as error:
            os.close(handle)
            shared_file.unlink(name, door)
            message = f"no room for a ring of {capacity_bytes} bytes: {error.strerror}"
            remedy = f"enlarge {shared_file.folder()} (docker: --shm-size)"
            raise OSError(error.errno, f"{message}; {remedy}") from error
        segment = cls(name, handle, door, waits)
        segment.liveness.claim(WRITER)
        return segment

    @classmethod
    def open(cls, name: str, waits: WaitMethod | None) -> Self:
        """Map an existing segment. Raises FileNotFoundError, or ValueError for a file that is no ring."""
        try:
            handle = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such ring; has its writer closed it already?", name) from error
        return cls(name, handle, None, waits)

    def unlink(self) -> None:
        """Prevent further opens; existing mappings stay. For the end that created the segment. Idempotent."""
        shared_file.unlink(self.name, self._door)
        self._door = None

    def close(self) -> None:
        """Unmap, and release this end's line. Idempotent."""
        if not self.closed:
            self.memory.release()
            self._mapping.close()
            self.closed = True
            os.close(self._handle)


def implementation() -> str:
    """The implementation in use on this machine: "compiled" or "plain"."""
    return "compiled" if _compiled(choose_wait_method()) else "plain"


def _compiled(waits: WaitMethod) -> Any:
    """The compiled module where it serves, else None."""
    return _ring if isinstance(waits, Futex) else None


def _choose_memory(mapping: mmap.mmap, line_count: int, capacity_bytes: int, waits: WaitMethod | None) -> PlainMemory:
    """The compiled memory if it was built and no way of sleeping was requested, else the plain one."""
    if waits is None:
        waits = choose_wait_method()
        if (compiled := _compiled(waits)) is not None:
            memory: PlainMemory = compiled.Memory(mapping, line_count, capacity_bytes)
            return memory
    return PlainMemory(mapping, line_count, capacity_bytes, waits, choose_fence())


def _size_bytes(reader_count: int, capacity_bytes: int) -> int:
    return LINE_BYTES * (2 + reader_count) + capacity_bytes


def _read_header(handle: int) -> tuple[int, int]:
    """(reader count, capacity), checked against the file's size."""
    status = os.fstat(handle)
    head = os.pread(handle, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    if len(head) < _HEADER.size:
        raise ValueError("not a ring: no file, or too short")
    magic, version, reader_count, capacity_bytes = _HEADER.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"not a ring of version {_VERSION}; start every process from one vnext release")
    is_capacity = capacity_bytes >= CAPACITY_BYTES_MIN and capacity_bytes % CAPACITY_MULTIPLE_BYTES == 0
    if reader_count < 1 or not is_capacity or status.st_size != _size_bytes(reader_count, capacity_bytes):
        header = f"its header says {reader_count} readers and {capacity_bytes} bytes"
        raise ValueError(f"a broken ring: {header}, its file has {status.st_size} bytes")
    return reader_count, capacity_bytes
