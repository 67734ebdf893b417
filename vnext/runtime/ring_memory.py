"""The memory of one ring: its layout, its cursors, and mapping it. Knows positions and bytes, no messages.

    line 0: magic, version, reader count, capacity | line 1: the writer | lines 2..: one a reader | data
A line is 128 bytes (two cache lines: processors fetch pairs), written by one process: a position, which counts bytes
since the start and never wraps, and a signal word, which changes with every publish and has the state in its low bits.
Memory order: data before position, position before signal. x86 keeps this by itself given aligned stores; elsewhere a
fence stands between (futex.choose_fence). A wake follows every publish: there is no "I sleep" flag, so no race on it.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Self

from vnext.runtime.futex import WaitMethod, choose_fence, choose_wait_method

_MAGIC = b"vnextrng"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ")
_LINE_BYTES = 128
_ALIGNMENT_BYTES = 8
_STATE_BITS = 2


class Presence(enum.IntEnum):
    """Whether the owner of a line is there."""

    FRESH = 0
    ATTACHED = 1
    GONE = 2


class Cursor:
    """One process's line: how far it is, and a word the others sleep on. Only its owner publishes."""

    def __init__(self, mapping: mmap.mmap, offset_bytes: int, waits: WaitMethod, fence: Callable[[], None]) -> None:
        self._position = ctypes.c_uint64.from_buffer(mapping, offset_bytes)
        self._signal = ctypes.c_uint32.from_buffer(mapping, offset_bytes + 8)
        self._address = ctypes.addressof(self._signal)
        self._waits = waits
        self._fence = fence

    def look(self) -> tuple[int, int]:
        """(signal, position), read in this order: a change after the look ends a wait on its signal at once."""
        signal = self._signal.value
        self._fence()
        position = self._position.value
        self._fence()
        return signal, position

    def publish(self, position: int, presence: Presence = Presence.ATTACHED) -> None:
        """Store the position, change the signal, wake whoever sleeps."""
        self._fence()
        self._position.value = position
        self._fence()
        count = (self._signal.value >> _STATE_BITS) + 1
        self._signal.value = (count << _STATE_BITS | presence) & 0xFFFFFFFF
        self._waits.wake(self._address)

    def wait(self, signal: int, timeout_s: float | None) -> None:
        """Sleep until the owner publishes, unless it has done so since `signal` was looked at. May return early."""
        self._waits.wait(self._address, signal, timeout_s)

    def release(self) -> None:
        """Give the memory back, so that the mapping can be closed."""
        self._position = self._signal = None


def presence(signal: int) -> int:
    """The state that a signal word carries: a value of Presence."""
    return signal & (1 << _STATE_BITS) - 1


def padded(size_bytes: int) -> int:
    """The room that `size_bytes` take in the ring, so that every message begins aligned."""
    return _round_up(size_bytes, _ALIGNMENT_BYTES)


class Segment:
    """The mapped memory of one ring: cursors, and copies that wrap around its end."""

    def __init__(self, mapping: mmap.mmap, waits: WaitMethod | None) -> None:
        magic, version, reader_count, capacity_bytes = _HEADER.unpack_from(mapping)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError(f"not a ring of version {_VERSION}; start every process from one vnext release")
        waits, fence = waits or choose_wait_method(), choose_fence()
        cursors = [Cursor(mapping, _LINE_BYTES * (1 + line), waits, fence) for line in range(1 + reader_count)]
        self.writer, self.readers = cursors[0], cursors[1:]
        self.capacity_bytes = capacity_bytes
        self._mapping = mapping
        self._data = memoryview(mapping)[_data_offset_bytes(reader_count) :]

    @classmethod
    def create(cls, name: str, capacity_bytes: int, reader_count: int, waits: WaitMethod | None) -> Self:
        """A new segment of at least `capacity_bytes`, all reserved. Raises FileExistsError, or OSError for no room."""
        capacity_bytes = _round_up(capacity_bytes, 2 * _ALIGNMENT_BYTES)  # half of it is aligned too
        mapping = _create_mapping(_path(name), _data_offset_bytes(reader_count) + capacity_bytes)
        _HEADER.pack_into(mapping, 0, _MAGIC, _VERSION, reader_count, capacity_bytes)
        return cls(mapping, waits)

    @classmethod
    def open(cls, name: str, waits: WaitMethod | None) -> Self:
        """Map an existing segment. Raises FileNotFoundError, or ValueError for a foreign file."""
        return cls(_open_mapping(_path(name)), waits)

    def put(self, position: int, source: memoryview) -> None:
        """Copy `source` to the place of `position`."""
        start = position % self.capacity_bytes
        first = min(len(source), self.capacity_bytes - start)
        self._data[start : start + first] = source[:first]
        self._data[: len(source) - first] = source[first:]

    def take(self, position: int, size_bytes: int) -> bytes:
        """A copy of the bytes at `position`."""
        start = position % self.capacity_bytes
        end = start + size_bytes
        if end <= self.capacity_bytes:
            return bytes(self._data[start:end])
        return b"".join((self._data[start:], self._data[: end - self.capacity_bytes]))

    def close(self) -> None:
        """Unmap; a second call does nothing."""
        for cursor in (self.writer, *self.readers):
            cursor.release()
        self._data.release()
        self._mapping.close()

    @property
    def closed(self) -> bool:
        return self._mapping.closed


def unlink(name: str) -> None:
    """Remove the name; processes that have it mapped keep it. Nothing happens when it is gone already."""
    _path(name).unlink(missing_ok=True)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _data_offset_bytes(reader_count: int) -> int:
    return _LINE_BYTES * (2 + reader_count)


def _path(name: str) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"ring name {name!r} must be a plain file name")
    shared_memory = Path("/dev/shm")  # what shm_open uses on Linux; opened directly, no resource tracker unlinks it
    return (shared_memory if shared_memory.is_dir() else Path("/tmp")) / name


def _create_mapping(path: Path, size_bytes: int) -> mmap.mmap:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _reserve(handle, size_bytes)
        return mmap.mmap(handle, size_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        remedy = f"enlarge {path.parent} (docker: --shm-size) or make the ring smaller"
        raise OSError(error.errno, f"no room for a ring of {size_bytes} bytes: {error.strerror}; {remedy}") from error
    finally:
        os.close(handle)


def _reserve(handle: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):  # absent on macOS
        os.posix_fallocate(handle, 0, size_bytes)
    else:
        os.ftruncate(handle, size_bytes)


def _open_mapping(path: Path) -> mmap.mmap:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such ring; has its writer closed it already?", str(path)) from error
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)
