"""Files in shared memory that processes map: made without a name in any folder where the system allows that.

Owns making, reserving, opening and locks; knows no contents. Other processes open such a file through its maker's /proc entry, so
nothing is left behind whenever a process is killed. Systems without that use a temporary file, which `unlink` removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import tempfile
from pathlib import Path


def folder() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def create_file(kind: str) -> tuple[str, int, int | None]:
    """(name, file descriptor, the descriptor that the name refers to, or None if the name is a path)."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        handle = os.open(folder(), flags | os.O_TMPFILE, 0o600)
    except (AttributeError, OSError):  # not Linux, or a file system without it
        path = f"{folder()}/vnext-{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        return path, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), None
    door = os.dup(handle)
    return f"/proc/{os.getpid()}/fd/{door}", handle, door


def unlink(name: str, door: int | None) -> None:
    """Prevent further opens; existing mappings stay."""
    if door is not None:
        os.close(door)
    elif not name.startswith("/proc/"):
        Path(name).unlink(missing_ok=True)


def reserve(handle: int, size_bytes: int) -> None:
    """Set the file's size, and reserve its memory where the system can. Raises OSError without room."""
    if hasattr(os, "posix_fallocate"):  # absent on macOS
        os.posix_fallocate(handle, 0, size_bytes)
    else:
        os.ftruncate(handle, size_bytes)


# ---- which ends are alive ----------------------------------------------------------------------------------------
# Each end of a ring locks a byte of its file; the kernel drops a dead process's locks. They are open file description locks
# (Linux, fcntl(2)): each end opens the file itself, so two ends in one process have two locks, a reused process number cannot
# mislead, and a killed process that was not yet reaped counts as dead. A fork shares its parent's locks until it ends or runs
# another program. Where the system has no such locks, every end counts as alive, and only a caller's own hook can find out.

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
        return not self._has_locks or _FLOCK.unpack(_ask(self._handle, line))[0] != fcntl.F_UNLCK


def _lock_of(line: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, _FROM_START, line, 1, 0)


def _ask(handle: int, line: int) -> bytes:
    return bytes(fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _lock_of(line)))


def _can_ask(handle: int) -> bool:
    try:
        _ask(handle, 0)
    except OSError:  # a sandbox or a file system without these locks
        return False
    return True
