"""Counts of API keys: what a key has spent and has in progress, whichever of the API servers of a port it asks.

They share a file with a row of float64 for each key: the spent requests and tokens, each with the moment at which that was so, and
the answers in progress at each server. Zeros are a key that nobody has used. No other process changes what one reads and writes
under the file's lock, which one that is killed gives back; its successor counts its answers from 0.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

BUDGETS = 4  # values of a row before the answers


class LockedFile:
    """A context in which an open file is locked against every other descriptor of it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class KeyCount(NamedTuple):
    """One key's row (float64), in which `place` is this process's among the answers, and the lock of all rows."""

    row: memoryview[float] = memoryview(b"")
    place: int = 0
    lock: AbstractContextManager[None] = nullcontext()

    @property
    def answers(self) -> int:
        """In progress at all servers together."""
        return int(sum(self.row[BUDGETS:]))

    def add_answers(self, count: int) -> None:
        self.row[BUDGETS + self.place] += count


def alone() -> KeyCount:
    """Of a key that this process alone counts."""
    return KeyCount(memoryview(bytearray(8 * (BUDGETS + 1))).cast("d"))


def shared(folder: str, place: int, place_count: int, key_count: int) -> list[KeyCount]:
    """Of each of so many keys, for the process at `place` of `place_count`. A list of keys with other entries has a file of its
    own."""
    width = BUDGETS + place_count
    fd = os.open(Path(folder) / f"{key_count}-keys.counts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, 8 * width * key_count)
    values = memoryview(mmap.mmap(fd, 8 * width * key_count)).cast("B").cast("d")
    lock = LockedFile(fd)
    found = [KeyCount(values[at : at + width], place, lock) for at in range(0, width * key_count, width)]
    for each in found:
        each.row[BUDGETS + place] = 0.0
    return found
