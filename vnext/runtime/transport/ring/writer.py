"""The writing end of a ring: sends whole messages, blocks while the ring is full, notices when readers are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Self

from vnext.runtime.processes.futex import WaitMethod
from vnext.runtime.transport.ring.common import (
    CLOSED,
    MESSAGE_BYTES_MAX,
    NANOSECONDS,
    RingAbandoned,
    RingClosed,
    RingCorrupt,
    look,
)
from vnext.runtime.transport.ring.memory import CAPACITY_BYTES_MIN, WRITER, Segment
from vnext.runtime.transport.ring.memory_plain import ALIGNMENT_BYTES, HEAD_BYTES, NUMBER_MASK, Presence, head_of, padded

CAPACITY_BYTES_DEFAULT = 4 * 2**20
ALIVE_POLL_S = 0.05  # how often a blocked writer asks whether its readers still live


class RingWriter:
    """The one writing end. The memory is freed once writer and readers are gone, however they end. One thread uses it.

    Readers attach by `name`. `stall_count` and `stall_seconds` count how often and how long `write` found the ring full.
    """

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self.stall_count = 0
        self.stall_seconds = 0.0
        self._segment = segment
        self._memory = segment.memory
        self._position = 0
        self._number = 0
        self._slowest_position = 0  # of the readers, as last seen: refreshed only when space seems to run out
        self._part_bytes_max = segment.capacity_bytes // 2
        self._is_torn = False

    @classmethod
    def create(
        cls, *, capacity_bytes: int = CAPACITY_BYTES_DEFAULT, reader_count: int, waits: WaitMethod | None = None
    ) -> Self:
        """A new ring. All its memory is reserved here, so that a full /dev/shm is an OSError now and no crash later.

        `waits` selects the plain implementation with this way of sleeping. Raises ValueError for a bad size.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN or reader_count < 1:
            given = f"not {capacity_bytes} and {reader_count}"
            raise ValueError(f"a ring needs at least {CAPACITY_BYTES_MIN} bytes and 1 reader, {given}")
        return cls(Segment.create(capacity_bytes, reader_count, waits))

    @property
    def capacity_bytes(self) -> int:
        return self._segment.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the slowest reader has yet to read."""
        if self._segment.closed:
            raise RingClosed(CLOSED)
        return self._position - min(self._reader_position(index) for index in range(self._segment.reader_count))

    @property
    def attached_count(self) -> int:
        if self._segment.closed:
            raise RingClosed(CLOSED)
        lines = range(1, 1 + self._segment.reader_count)
        return sum(look(self._memory, line)[0] == Presence.ATTACHED for line in lines)

    def write(
        self, message: bytes, timeout_s: float | None = None, is_alive: Callable[[], None] | None = None
    ) -> None:
        """Send `message` to every reader; blocks while the ring is full (None: without limit).

        While blocked, `is_alive` is called every 50 ms, and its error passes through. Raises TimeoutError when time is
        over; when the ring is full, RingClosed if a reader has left and RingAbandoned if its process has ended (one
        that has not attached yet is waited for); ValueError over MESSAGE_BYTES_MAX. A message of at most half the
        capacity is sent wholly or not at all; after an error inside a longer one the ring can only be closed.
        """
        if self._segment.closed:
            raise RingClosed(CLOSED)
        if self._is_torn:
            raise RingClosed("the ring holds half a message after a failed write; create a new one")
        if len(message) > self._part_bytes_max:
            self._write_in_parts(message, timeout_s, is_alive)
        else:
            self._ensure_space(HEAD_BYTES + padded(len(message)), timeout_s, is_alive)
            self._position = self._memory.send(self._position, self._number, message)
        self._number = self._number + 1 & NUMBER_MASK

    def unlink(self) -> None:
        """Let no further reader attach. Nothing is left behind without it either."""
        self._segment.unlink()

    def close(self) -> None:
        """Tell the readers that nothing follows, and unmap. What is written can still be read. Idempotent."""
        if self._segment.closed:
            return
        self._memory.publish(WRITER, self._position, Presence.GONE)
        self._segment.unlink()
        self._segment.close()

    def _write_in_parts(self, message: bytes, timeout_s: float | None, is_alive: Callable[[], None] | None) -> None:
        """The head goes with the first part; each later part has the capacity's half, but for the last."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {len(message)} bytes is over the ring's bound of {MESSAGE_BYTES_MAX}")
        end_s = time.monotonic() + (inf if timeout_s is None else timeout_s)
        head, body = head_of(self._number, len(message)), memoryview(message)
        for start in range(0, len(message), self._part_bytes_max):
            part = body[start : start + self._part_bytes_max]
            self._ensure_space(len(head) + padded(len(part)), end_s - time.monotonic(), is_alive)
            self._memory.put(self._position, head)
            self._memory.put(self._position + len(head), part)
            self._position += len(head) + padded(len(part))
            self._memory.publish(WRITER, self._position, Presence.ATTACHED)
            head, self._is_torn = b"", start + len(part) < len(message)

    def _ensure_space(self, size_bytes: int, timeout_s: float | None, is_alive: Callable[[], None] | None) -> None:
        oldest_allowed = self._position + size_bytes - self._segment.capacity_bytes
        if self._slowest_position >= oldest_allowed:
            return
        readers = range(self._segment.reader_count)
        self._slowest_position = min(self._reader_position(index) for index in readers)
        if self._slowest_position >= oldest_allowed:
            return
        self.stall_count += 1
        begin_s = time.monotonic()
        end_s = begin_s + (inf if timeout_s is None else timeout_s)
        try:
            for index in readers:
                self._await_reader(index, oldest_allowed, end_s, is_alive)
        finally:
            self.stall_seconds += time.monotonic() - begin_s

    def _await_reader(
        self, index: int, oldest_allowed: int, end_s: float, is_alive: Callable[[], None] | None
    ) -> None:
        is_dead = False
        while (position := self._reader_position(index)) < oldest_allowed:
            presence = look(self._memory, 1 + index)[0]
            if presence == Presence.GONE:
                raise RingClosed(f"reader {index} has left the ring with messages unread")
            if is_alive is not None:
                is_alive()
            if is_dead:
                raise RingAbandoned(f"the process of the ring's reader {index} has ended with messages unread")
            rest_s = end_s - time.monotonic()
            if presence == Presence.ATTACHED and not self._segment.liveness.has_owner(1 + index):
                is_dead = True  # its last act may have come after our look, and the hook may know more soon
            elif rest_s <= 0:
                raise TimeoutError(f"the ring stayed full: its reader {index} does not read; is its process stuck?")
            wait_s = ALIVE_POLL_S if is_dead else min(rest_s, ALIVE_POLL_S)
            self._memory.await_change(1 + index, position, 0, int(wait_s * NANOSECONDS))

    def _reader_position(self, index: int) -> int:
        position = look(self._memory, 1 + index)[1]
        unread = self._position - position
        if not 0 <= unread <= self._segment.capacity_bytes or position % ALIGNMENT_BYTES:
            raise RingCorrupt(f"reader {index} of the ring stands at {position}, its writer at {self._position}")
        return position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
