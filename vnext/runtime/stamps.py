"""Stamps: the file beside a log's segment that says when each frame was written (format: vnext/state/stamps.py).

Noted in memory; packed and written some hundred, or those of a second, at once: what a kill loses are times, never events, and
a step pays for a note. A disk that fails costs stamps and nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vnext.state.stamps import Stamper, stamps_name

FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
NOTES_MAX = 2 * 1024
UNWRITTEN_MAX_NS = 10**9


def stamps_path(segment: Path) -> Path:
    """The file of a segment's stamps."""
    return segment.with_name(stamps_name(segment.name))


class StampFile:
    """The stamps of one segment. Mutable. A note is two numbers: the event behind a frame and ns, or a step's complement and
    seconds."""

    def __init__(self, segment: Path) -> None:
        self._path = stamps_path(segment)
        self._stamper = Stamper(time.time_ns() - time.monotonic_ns())
        self._notes: list[int | float] = []
        self._due_ns = 0
        self._usable = True

    def add(self, next_event: int, now_ns: int) -> None:
        """A frame that ends before this event was written now."""
        notes = self._notes
        notes += (next_event, now_ns)
        if now_ns >= self._due_ns or len(notes) >= NOTES_MAX:
            self._due_ns = now_ns + UNWRITTEN_MAX_NS
            self.flush()

    def took(self, step: int, seconds: float) -> None:
        """Rank 0 was busy with a step for so long."""
        self._notes += (~step, seconds)

    def close(self) -> None:
        """Write the rest; the result of a step whose frame comes into the next segment is here."""
        self._pack()
        self._stamper.set_apart()
        self.flush()

    def _pack(self) -> None:
        notes, stamper = self._notes, self._stamper
        for number, told in zip(notes[::2], notes[1::2]):
            if number < 0:
                stamper.took(~number, int(told * 1e6))
            else:
                stamper.add(number, told // 1000)
        notes.clear()

    def flush(self) -> None:
        """Append what was added; a failing disk loses it, and all that would come behind a part of it."""
        self._pack()
        self._stamper.end_block()
        data = self._stamper.data
        try:
            if self._usable and data:
                fd = os.open(self._path, FLAGS, FILE_MODE)
                try:
                    self._usable = os.write(fd, data) == len(data)
                finally:
                    os.close(fd)
        except OSError:
            pass  # times are worth no trouble
        data.clear()
