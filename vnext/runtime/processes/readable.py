"""Readable: waits for descriptors of any number. `select` takes none above 1,023, which a process with many connections has."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterable
from typing import Protocol


class HasFileno(Protocol):
    """A socket, say."""

    def fileno(self) -> int: ...


def readable(watched: Iterable[int | HasFileno], timeout_s: float | None) -> set[int]:
    """The descriptors that can be read, or whose other end is gone; waits for the first of them, at most `timeout_s`, None for
    any time. Raises OSError or ValueError for one that is closed."""
    poll = select.poll()
    for each in watched:
        poll.register(each, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    if any(event & select.POLLNVAL for _, event in ready):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return {descriptor for descriptor, _ in ready}
