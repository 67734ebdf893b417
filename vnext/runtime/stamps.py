"""Stamps: the file beside a log's segment that says when each frame was written (format: vnext/state/stamps.py).

Kept in memory and written some hundred, or those of a second, at once: what a kill loses are times, never events. A disk that
fails costs stamps and nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vnext.state.stamps import Stamper, stamps_name

FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
UNWRITTEN_MAX = 512
UNWRITTEN_MAX_US = 1_000_000


def stamps_path(segment: Path) -> Path:
    """The file of a segment's stamps."""
    return segment.with_name(stamps_name(segment.name))


class StampFile:
    """The stamps of one segment. Mutable."""

    def __init__(self, segment: Path) -> None:
        self._path = stamps_path(segment)
        self._stamper = Stamper(time.time_ns() - time.monotonic_ns())
        self._due_us = 0
        self._usable = True

    def add(self, next_event: int) -> None:
        """A frame that ends before this event is written now."""
        now_us = time.monotonic_ns() // 1000
        self._stamper.add(next_event, now_us)
        if now_us >= self._due_us or len(self._stamper) >= UNWRITTEN_MAX:
            self.flush()
            self._due_us = now_us + UNWRITTEN_MAX_US

    def took(self, step: int, seconds: float) -> None:
        """Rank 0 was busy with a step for so long."""
        self._stamper.took(step, int(seconds * 1e6))

    def close(self) -> None:
        """Write the rest; the result of a step whose frame comes into the next segment is here."""
        self._stamper.set_apart()
        self.flush()

    def flush(self) -> None:
        """Append what was added; a failing disk loses it, and all that would come behind a part of it."""
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
