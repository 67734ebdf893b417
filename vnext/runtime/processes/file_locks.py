"""File locks: which ends are alive. Each end of a ring locks a byte of its file; the kernel drops a dead process's locks.

Owns the locks; knows no messages. They are open file description locks (Linux, fcntl(2)): each end opens the file itself, so
two ends in one process have two locks, a reused process number cannot mislead, and a killed process that was not yet reaped
counts as dead. A fork shares its parent's locks until it ends or runs another program. Where the system has no such locks,
every end counts as alive, and only a caller's own hook can find out.
"""

from __future__ import annotations

import errno
import fcntl
import struct

_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, length, process
_FROM_START = 0


class Liveness:
    """The locks of one ring as one end sees them: the owner of line n locks byte n of the file."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._has_locks = hasattr(fcntl, "F_OFD_SETLK") and _can_ask(handle)

    def claim(self, line: int) -> bool:
        """Own `line` until this end closes or its process ends; False when another end owns it."""
        if not self._has_locks:
            return True
        try:
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, _lock_of(line))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def has_owner(self, line: int) -> bool:
        """Whether another end owns `line` and lives. Asks the kernel: about a microsecond."""
        return not self._has_locks or _type_of(_ask(self._handle, line)) != fcntl.F_UNLCK


def _lock_of(line: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, _FROM_START, line, 1, 0)


def _ask(handle: int, line: int) -> bytes:
    return bytes(fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _lock_of(line)))


def _type_of(answer: bytes) -> int:
    return int(_FLOCK.unpack(answer)[0])


def _can_ask(handle: int) -> bool:
    try:
        _ask(handle, 0)
    except OSError:  # a sandbox or a file system without these locks
        return False
    return True
