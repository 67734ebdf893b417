"""Stamps: the file beside a log's segment that says when each frame was written (format: vnext/state/stamps.py).

Kept in memory and written some hundred at once: what a kill loses are times, never events. A disk that fails costs the
stamps and nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vnext.state.log import SEGMENT_SUFFIX
from vnext.state.stamps import MAGIC, STAMPS_SUFFIX, STEP_BIT, head, stamp

FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
UNWRITTEN_MAX_BYTES = 256 * stamp.size


def stamps_path(segment: Path) -> Path:
    """The file of a segment's stamps."""
    return segment.with_name(segment.name.removesuffix(SEGMENT_SUFFIX) + STAMPS_SUFFIX)


class StampFile:
    """The stamps of one segment. Mutable."""

    def __init__(self, segment: Path) -> None:
        self._path = stamps_path(segment)
        self._unwritten = bytearray(head.pack(MAGIC, time.time_ns(), time.monotonic_ns()))

    def add(self, next_event: int) -> None:
        """A frame that ends before this event is written now."""
        self._unwritten += stamp.pack(next_event, time.monotonic_ns())
        if len(self._unwritten) >= UNWRITTEN_MAX_BYTES:
            self.flush()

    def took(self, step: int, seconds: float) -> None:
        """Rank 0 was busy with a step for so long."""
        self._unwritten += stamp.pack(STEP_BIT | step, int(seconds * 1e9))

    def flush(self) -> None:
        """Append what was added; a failing disk loses it."""
        try:
            fd = os.open(self._path, FLAGS, FILE_MODE)
            try:
                os.write(fd, self._unwritten)
            finally:
                os.close(fd)
        except OSError:
            pass  # times are worth no trouble
        self._unwritten.clear()
