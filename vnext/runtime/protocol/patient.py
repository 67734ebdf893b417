"""Standard output and error that nobody has to read: a pipe that is full stops neither who serves nor who starts it again."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

TIMEOUT_MS = 1000
"""So long may a reader pause before words are left out."""


class PatientStream:
    """A stream of text, as of a logging handler, to a descriptor: one write at a time, so that whole lines stay whole. What cannot
    be written in time is left out, and after that nothing waits until there is room again. Mutable; for all threads."""

    def __init__(self, descriptor: int, timeout_ms: int = TIMEOUT_MS) -> None:
        self._descriptor, self._timeout_ms = descriptor, timeout_ms
        self._lock, self._is_stuck = threading.Lock(), False

    def write(self, text: str) -> None:
        """Write a text."""
        self.pass_on(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """All is written at once."""

    def pass_on(self, data: bytes) -> None:
        """Write bytes. Where the descriptor is closed, they are left out too."""
        rest = memoryview(data)
        with self._lock, suppress(OSError):
            while rest and self._has_room():
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]

    def _has_room(self) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        self._is_stuck = not poller.poll(0 if self._is_stuck else self._timeout_ms)
        return not self._is_stuck


STDOUT, STDERR = PatientStream(1), PatientStream(2)
"""This process's own."""
