"""The operations on a ring's memory in plain Python: the oracle of _ring.c, and the implementation where that was not built.

Owns the words of the cursors and the copying; knows no files, and of messages only their heads. It trusts nothing it reads from
the memory: it leaves alone whatever violates the ring's bounds, and ring.py reports the fault. Memory order: data before
position, position before signal. x86 guarantees this for aligned stores; elsewhere a fence stands between (futex.choose_fence).
A wake follows every publish: there is no "I sleep" flag, so no race on it.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from vnext.runtime.processes.futex import WaitMethod

Word = TypeVar("Word", ctypes.c_uint32, ctypes.c_uint64)
LINE_BYTES = 128  # two cache lines, because processors fetch pairs
HEAD_BYTES = 8
ALIGNMENT_BYTES = 8
NUMBER_MASK = 0xFFFFFFFF

_HEAD = struct.Struct("<II")
HEAD_MARK = 0x52494E47  # so that memory full of zeros holds no message
_STATE_BITS = 2
STATE_MASK = (1 << _STATE_BITS) - 1  # of a signal word: a value of Presence, or 3 in a broken one


_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))


class Presence(enum.IntEnum):
    """Whether a line's owner is attached."""

    FRESH = 0
    ATTACHED = 1
    GONE = 2


class PlainMemory:
    """The lines and the data of one mapped ring: `buffer` holds a header line, `line_count` lines, `capacity_bytes`.

    Line 0 is the writer's. Positions are multiples of 8 and never wrap. Operations on a released memory raise ValueError.
    """

    def __init__(
        self,
        buffer: mmap.mmap | bytearray,
        line_count: int,
        capacity_bytes: int,
        waits: WaitMethod,
        fence: Callable[[], None],
    ) -> None:
        data_offset_bytes = (1 + line_count) * LINE_BYTES
        view = memoryview(buffer)
        if not 1 <= line_count <= len(view) or capacity_bytes % 16 or len(view) != data_offset_bytes + capacity_bytes:
            raise ValueError("the buffer has another size than its lines and its capacity")
        self._capacity_bytes = capacity_bytes
        self._data = view[data_offset_bytes:]
        offsets = range(LINE_BYTES, data_offset_bytes, LINE_BYTES)
        self._positions = [ctypes.c_uint64.from_buffer(buffer, offset) for offset in offsets]
        self._signals = [ctypes.c_uint32.from_buffer(buffer, offset + 8) for offset in offsets]
        self._waits = waits
        self._fence = fence

    def look(self, line: int) -> tuple[int, int]:
        """(signal, position) of a line, read in this order: any change after the look ends a wait on that signal."""
        signal = self._line(self._signals, line).value
        self._fence()
        position = self._positions[line].value
        self._fence()
        return signal, position

    def publish(self, line: int, position: int, presence: int) -> None:
        """Store the position, change the signal, wake every sleeper."""
        signal = self._line(self._signals, line)
        self._fence()
        self._positions[line].value = position
        self._fence()
        count = (signal.value >> _STATE_BITS) + 1
        signal.value = (count << _STATE_BITS | presence) & 0xFFFFFFFF
        self._waits.wake(ctypes.addressof(signal))

    def await_change(self, line: int, position: int, spin_ns: int, timeout_ns: int) -> None:
        """Return once the line's position differs, its owner has left, or time is over. May return early: look again.

        Spins for `spin_ns`, yielding the core to other threads, then sleeps in the kernel.
        """
        begin_ns = time.monotonic_ns()
        while True:
            signal, found = self.look(line)
            if found != position or signal & STATE_MASK >= Presence.GONE:
                return
            passed_ns = time.monotonic_ns() - begin_ns
            if passed_ns >= timeout_ns:
                return
            if passed_ns >= spin_ns:
                address = ctypes.addressof(self._signals[line])
                return self._waits.wait(address, signal, (timeout_ns - passed_ns) * 1e-9)
            _give_way()

    def put(self, position: int, source: bytes | memoryview) -> None:
        """Copy `source`, at most the capacity, to `position`."""
        start = self._place(position, len(source))
        first = min(len(source), self._capacity_bytes - start)
        self._data[start : start + first] = source[:first]
        self._data[: len(source) - first] = source[first:]

    def take(self, position: int, size_bytes: int) -> bytes:
        """A copy of the bytes at `position`, at most the capacity."""
        start = self._place(position, size_bytes)
        end = start + size_bytes
        if end <= self._capacity_bytes:
            return bytes(self._data[start:end])
        return b"".join((self._data[start:], self._data[: end - self._capacity_bytes]))

    def send(self, position: int, number: int, message: bytes) -> int:
        """Write message `number` whole, at most half the capacity, and publish it; returns the position behind it."""
        if len(message) > self._capacity_bytes // 2:
            raise ValueError("a message longer than half the ring goes in parts")
        self.put(position, head_of(number, len(message)))
        self.put(position + HEAD_BYTES, message)
        position += HEAD_BYTES + padded(len(message))
        self.publish(0, position, Presence.ATTACHED)
        return position

    def receive(self, own_line: int, position: int, number: int, spin_ns: int, timeout_ns: int) -> bytes | None:
        """Wait like `await_change` for the whole message `number` at `position`, return it and free its room.

        None when there is nothing, and when there is no such whole message: a part of a longer one, or a broken one.
        """
        self._line(self._signals, own_line)
        if self.look(0)[1] == position:
            self.await_change(0, position, spin_ns, timeout_ns)
        available = self.look(0)[1] - position
        if not HEAD_BYTES <= available <= self._capacity_bytes or available % ALIGNMENT_BYTES:
            return None
        length = length_in(self.take(position, HEAD_BYTES), number)
        if length is None or length > self._capacity_bytes // 2 or HEAD_BYTES + padded(length) > available:
            return None
        message = self.take(position + HEAD_BYTES, length)
        self.publish(own_line, position + HEAD_BYTES + padded(length), Presence.ATTACHED)
        return message

    def release(self) -> None:
        """Give the buffer back, so that the mapping can be closed. Idempotent."""
        self._positions, self._signals = [], []
        self._data.release()

    def _line(self, words: list[Word], line: int) -> Word:
        if not 0 <= line < len(words):
            raise ValueError(f"the ring's memory was released or has no line {line}")
        return words[line]

    def _place(self, position: int, size_bytes: int) -> int:
        if position < 0 or position % ALIGNMENT_BYTES or not 0 <= size_bytes <= self._capacity_bytes:
            raise ValueError(f"{size_bytes} bytes at position {position} do not lie in the ring")
        return position % self._capacity_bytes


def padded(size_bytes: int) -> int:
    """The room that `size_bytes` take in the ring, where every message begins aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def head_of(number: int, size_bytes: int) -> bytes:
    """The 8 bytes before message `number`: its size, and the size combined with the number, so that a changed size, a lost
    message and a wrong position are all detected."""
    return _HEAD.pack(size_bytes, size_bytes ^ (number & NUMBER_MASK) ^ HEAD_MARK)


def length_in(head: bytes, number: int) -> int | None:
    """The size in bytes that `head` gives for message `number`, None when it is another message's head."""
    size_bytes, crossed = _HEAD.unpack(head)
    return size_bytes if crossed == size_bytes ^ (number & NUMBER_MASK) ^ HEAD_MARK else None
