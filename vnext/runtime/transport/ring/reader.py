"""A reading end of a ring: spins, then sleeps; returns whole messages in order; notices when the writer is gone."""

from __future__ import annotations

import time
from math import inf
from typing import Self

from vnext.runtime.processes.futex import WaitMethod
from vnext.runtime.processes.thread_plan import ring_spin_us
from vnext.runtime.transport.ring.common import (
    CLOSED,
    MESSAGE_BYTES_MAX,
    NANOSECONDS,
    RingAbandoned,
    RingClosed,
    RingCorrupt,
    look,
)
from vnext.runtime.transport.ring.memory import WRITER, Segment
from vnext.runtime.transport.ring.memory_plain import ALIGNMENT_BYTES, HEAD_BYTES, NUMBER_MASK, Presence, length_in, padded

WRITER_POLL_S = 0.25  # after this time a sleeping reader asks whether the writer still lives, then half as often, ...
IDLE_POLLS = 8  # ... down to once per this many periods: an idle rank wakes every two seconds


class RingReader:
    """One of the reading ends. One thread uses it."""

    def __init__(self, segment: Segment, reader_index: int, spin_us: float) -> None:
        self._segment = segment
        self._memory = segment.memory
        self._line = 1 + reader_index
        self._position = 0
        self._number = 0
        self._spin_ns = int(spin_us * 1e3)
        self._parts: list[bytes] = []
        self._missing_bytes: int | None = None  # of a message that has begun

    @classmethod
    def attach(
        cls, name: str, reader_index: int, *, spin_us: float | None = None, waits: WaitMethod | None = None
    ) -> Self:
        """Take one of the readers' places. The first `read` returns the first message ever written.

        `spin_us` is how long a `read` spins before it sleeps (None: thread_plan.py's choice). It yields the core to other
        threads, yet pays only with a core to spare. `waits`: see RingWriter.create. Raises FileNotFoundError for an unknown
        name, ValueError for a file that is no ring or for a place that is taken, was used before or does not exist.
        """
        segment = Segment.open(name, waits)
        reader_count = segment.reader_count
        if not (0 <= reader_index < reader_count and _claim(segment, 1 + reader_index)):
            segment.close()
            raise ValueError(f"place {reader_index} of {reader_count} in the ring is taken, was used or does not exist")
        return cls(segment, reader_index, ring_spin_us(reader_count) if spin_us is None else spin_us)

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message, or None when `timeout_s` is over (None: no limit); a partly read message stays for the next call.

        Once every whole message was read, raises RingClosed when the writer has closed the ring, and RingAbandoned when its
        process has ended, within IDLE_POLLS times WRITER_POLL_S. Raises RingCorrupt for memory that no writer of ours has
        written.
        """
        if self._segment.closed:
            raise RingClosed(CLOSED)
        only_looks = timeout_s is not None and timeout_s <= 0  # and reads no clock
        end_s = 0.0 if only_looks else time.monotonic() + (inf if timeout_s is None else timeout_s)
        spin_ns, is_dead, poll_s = self._spin_ns, False, WRITER_POLL_S
        while True:
            wait_s = 0.0 if only_looks else max(0.0, min(end_s - time.monotonic(), poll_s))
            if (message := self._wait_and_take(spin_ns, 0 if is_dead else int(wait_s * NANOSECONDS))) is not None:
                return message
            presence, position = look(self._memory, WRITER)
            if position != self._position:
                if (message := self._take_part(position)) is not None:
                    return message
            elif presence == Presence.GONE:
                raise RingClosed("the writer has closed the ring")
            elif is_dead:
                raise RingAbandoned("the process of the ring's writer has ended without closing it")
            elif not self._segment.liveness.has_owner(WRITER):
                is_dead = True  # its last message may have come after our look
            elif only_looks or end_s <= time.monotonic():
                return None
            spin_ns, poll_s = 0, min(2 * poll_s, IDLE_POLLS * WRITER_POLL_S)

    def close(self) -> None:
        """Leave the ring: a writer that would have to wait for this reader gets RingClosed. Idempotent."""
        if self._segment.closed:
            return
        self._memory.publish(self._line, self._position, Presence.GONE)
        self._segment.close()

    def _wait_and_take(self, spin_ns: int, timeout_ns: int) -> bytes | None:
        """Wait for news; returns the message if it is whole, the usual case. None: look closer."""
        if self._missing_bytes is not None:
            self._memory.await_change(WRITER, self._position, spin_ns, timeout_ns)
            return None
        message = self._memory.receive(self._line, self._position, self._number, spin_ns, timeout_ns)
        if message is not None:
            self._position += HEAD_BYTES + padded(len(message))
            self._number = self._number + 1 & NUMBER_MASK
        return message

    def _take_part(self, written: int) -> bytes | None:
        """Copy and free the available part of the current message, up to `written`; returns the message once it is whole."""
        available = written - self._position
        if not 0 < available <= self._segment.capacity_bytes or available % ALIGNMENT_BYTES:
            raise RingCorrupt(f"the ring's writer stands at {written}, its reader at {self._position}")
        position, missing_bytes = self._position, self._missing_bytes
        if missing_bytes is None:
            missing_bytes = self._length_at(position)
            position, available = position + HEAD_BYTES, available - HEAD_BYTES
        part_bytes = min(missing_bytes, available)
        if part_bytes < min(missing_bytes, self._segment.capacity_bytes // 2):
            raise RingCorrupt(f"the ring holds {part_bytes} bytes where a part of a message of {missing_bytes} is due")
        self._parts.append(self._memory.take(position, part_bytes))
        self._missing_bytes = missing_bytes - part_bytes
        self._position = position + padded(part_bytes)
        self._memory.publish(self._line, self._position, Presence.ATTACHED)
        return None if self._missing_bytes else self._whole()

    def _whole(self) -> bytes:
        message = b"".join(self._parts)
        self._parts.clear()
        self._missing_bytes = None
        self._number = self._number + 1 & NUMBER_MASK
        return message

    def _length_at(self, position: int) -> int:
        length = length_in(self._memory.take(position, HEAD_BYTES), self._number)
        if length is None or length > MESSAGE_BYTES_MAX:
            raise RingCorrupt(f"no head of message {self._number} stands at position {position} of the ring")
        return length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _claim(segment: Segment, line: int) -> bool:
    """Take a place that no reader ever had. A reader that dies between the two steps leaves it free."""
    if not segment.liveness.claim(line) or look(segment.memory, line)[0] != Presence.FRESH:
        return False
    segment.memory.publish(line, 0, Presence.ATTACHED)
    return True
