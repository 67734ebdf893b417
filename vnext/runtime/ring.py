"""The ring: byte messages from one writer to several readers through POSIX shared memory. No codec, no process.

In the ring a message is its length (8 bytes), its bytes, and padding to 8. At most half the capacity is published at
once; a longer message follows in parts as the readers make room, so any size passes. Every reader gets every message in
order, also those written before it attached. A full ring blocks the writer and is counted; an empty one puts the reader
to sleep in the kernel. The writer owns the name and unlinks it. See ring_memory.py for layout and memory order.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Callable
from typing import Self

from vnext.runtime.futex import WaitMethod
from vnext.runtime.ring_memory import Cursor, Presence, Segment, padded, presence, unlink

CAPACITY_BYTES_DEFAULT = 4 * 2**20
CAPACITY_BYTES_MIN = 64
ALIVE_POLL_S = 0.05  # how often a blocked writer asks whether its readers still live

_LENGTH = struct.Struct("<Q")


class RingClosed(Exception):
    """The other side has left the ring, or this side has closed it: no message will pass any more."""


class RingWriter:
    """The one writing end. It owns the name: it unlinks it at close, or earlier by `unlink`. One thread uses it.

    `stall_count` and `stall_seconds` tell how often and how long `write` found the ring full.
    """

    def __init__(self, name: str, segment: Segment) -> None:
        self.name = name
        self.stall_count = 0
        self.stall_seconds = 0.0
        self._segment = segment
        self._position = 0
        self._slowest_position = 0  # of the readers, as last seen: they are looked at only when space seems to end
        self._part_bytes_max = segment.capacity_bytes // 2
        self._is_torn = False

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
        reader_count: int,
        waits: WaitMethod | None = None,
    ) -> Self:
        """A new ring. Its whole memory is reserved here, so that a full /dev/shm is an OSError now and no crash later.

        Raises ValueError for a bad size or name, FileExistsError for a taken name.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN or reader_count < 1:
            given = f"not {capacity_bytes} and {reader_count}"
            raise ValueError(f"a ring needs at least {CAPACITY_BYTES_MIN} bytes and 1 reader, {given}")
        name = name or f"vnext-ring-{os.getpid()}-{secrets.token_hex(4)}"
        return cls(name, Segment.create(name, capacity_bytes, reader_count, waits))

    @property
    def capacity_bytes(self) -> int:
        return self._segment.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the slowest reader has yet to read."""
        _require_open(self._segment)
        return self._position - min(reader.look()[1] for reader in self._segment.readers)

    @property
    def attached_count(self) -> int:
        """Readers that are attached now."""
        _require_open(self._segment)
        return sum(presence(reader.look()[0]) == Presence.ATTACHED for reader in self._segment.readers)

    def write(
        self, message: bytes, timeout_s: float | None = None, is_alive: Callable[[], None] | None = None
    ) -> None:
        """Send `message` to every reader; blocks while the ring is full (None: without limit).

        While blocked, `is_alive` is called every 50 ms: it raises when a reader has died, and its error passes through.
        Raises TimeoutError when time is over, RingClosed when a reader has left. A message of at most half the capacity
        is sent wholly or not at all; after an error inside a longer one the ring can only be closed.
        """
        _require_open(self._segment)
        if self._is_torn:
            raise RingClosed(f"ring {self.name} holds half a message after a failed write; create a new one")
        end_s = _deadline_s(timeout_s)
        body, start = memoryview(message), 0
        prefix = _LENGTH.pack(len(body))
        while prefix or start < len(body):
            part = body[start : start + self._part_bytes_max]
            self._ensure_space(len(prefix) + padded(len(part)), end_s, is_alive)
            self._publish_part(prefix, part)
            prefix, start = b"", start + len(part)
            self._is_torn = start < len(body)

    def unlink(self) -> None:
        """Remove the name; attached readers keep the memory. Called once all are there, even a kill leaves nothing."""
        unlink(self.name)

    def close(self) -> None:
        """Tell the readers that nothing follows, unlink, unmap. What is written can still be read. Idempotent."""
        if self._segment.closed:
            return
        self._segment.writer.publish(self._position, Presence.GONE)
        self.unlink()
        self._segment.close()

    def _publish_part(self, prefix: bytes, part: memoryview) -> None:
        if prefix:
            self._segment.put(self._position, memoryview(prefix))
        self._segment.put(self._position + len(prefix), part)
        self._position += len(prefix) + padded(len(part))
        self._segment.writer.publish(self._position)

    def _ensure_space(self, size_bytes: int, end_s: float | None, is_alive: Callable[[], None] | None) -> None:
        oldest_allowed = self._position + size_bytes - self.capacity_bytes
        if self._slowest_position >= oldest_allowed:
            return
        self._slowest_position = min(reader.look()[1] for reader in self._segment.readers)
        if self._slowest_position >= oldest_allowed:
            return
        self.stall_count += 1
        begin_s = time.monotonic()
        try:
            for index, reader in enumerate(self._segment.readers):
                self._await_reader(index, reader, oldest_allowed, end_s, is_alive)
        finally:
            self.stall_seconds += time.monotonic() - begin_s

    def _await_reader(
        self, index: int, reader: Cursor, oldest_allowed: int, end_s: float | None, is_alive: Callable[[], None] | None
    ) -> None:
        while True:
            signal, position = reader.look()
            if position >= oldest_allowed:
                return
            if presence(signal) == Presence.GONE:
                raise RingClosed(f"reader {index} has left ring {self.name} with messages unread")
            if is_alive is not None:
                is_alive()
            left_s = _left_s(end_s)
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"ring {self.name} stayed full: reader {index} does not read; is its process stuck?")
            reader.wait(signal, ALIVE_POLL_S if left_s is None else min(left_s, ALIVE_POLL_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RingReader:
    """One of the reading ends; it never unlinks. One thread uses it. `spin_us` pays only with a core to spare."""

    def __init__(self, segment: Segment, reader_index: int, spin_us: float) -> None:
        self._segment = segment
        self._cursor = segment.readers[reader_index]
        self._position = 0
        self._spin_s = spin_us * 1e-6
        self._parts: list[bytes] = []
        self._missing_bytes = 0

    @classmethod
    def attach(cls, name: str, reader_index: int, *, spin_us: float = 0, waits: WaitMethod | None = None) -> Self:
        """Take one of the reader's places. The first `read` gives the first message ever written.

        Raises FileNotFoundError for an unknown name, ValueError for a foreign file or a place taken or not there.
        """
        segment = Segment.open(name, waits)
        reader_count = len(segment.readers)
        if not (0 <= reader_index < reader_count and _is_fresh(segment.readers[reader_index])):
            segment.close()
            raise ValueError(f"place {reader_index} of {reader_count} in ring {name} is taken or does not exist")
        segment.readers[reader_index].publish(0)
        return cls(segment, reader_index, spin_us)

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message, or None when `timeout_s` is over (None: no limit); a message begun stays for the next call.

        Raises RingClosed when the writer has closed the ring and every whole message was read.
        """
        _require_open(self._segment)
        end_s = _deadline_s(timeout_s)
        while True:
            signal, position = self._segment.writer.look()
            if position > self._position:
                if (message := self._take(position)) is not None:
                    return message
            elif presence(signal) == Presence.GONE:
                raise RingClosed("the writer has closed the ring")
            elif (left_s := _left_s(end_s)) is not None and left_s <= 0:
                return None
            elif not self._spin():
                self._segment.writer.wait(signal, left_s)

    def close(self) -> None:
        """Leave the ring: a writer that would have to wait for this reader gets RingClosed. Idempotent."""
        if self._segment.closed:
            return
        self._cursor.publish(self._position, Presence.GONE)
        self._segment.close()

    def _take(self, written: int) -> bytes | None:
        """Copy and free what is there of the current message, up to `written`; returns it once it is whole."""
        position = self._position
        if not self._missing_bytes:
            self._missing_bytes = _LENGTH.unpack(self._segment.take(position, _LENGTH.size))[0]
            position += _LENGTH.size
        part_bytes = min(self._missing_bytes, written - position)
        self._parts.append(self._segment.take(position, part_bytes))
        self._missing_bytes -= part_bytes
        self._position = position + padded(part_bytes)
        self._cursor.publish(self._position)
        if self._missing_bytes:
            return None
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def _spin(self) -> bool:
        """Look again and again for `spin_us`; whether something came."""
        end_s = time.monotonic() + self._spin_s
        while self._spin_s and time.monotonic() < end_s:
            if self._segment.writer.look()[1] > self._position:
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _deadline_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left_s(end_s: float | None) -> float | None:
    return None if end_s is None else end_s - time.monotonic()


def _require_open(segment: Segment) -> None:
    if segment.closed:
        raise RingClosed("this end of the ring is closed")


def _is_fresh(cursor: Cursor) -> bool:
    return presence(cursor.look()[0]) == Presence.FRESH
