"""Files in shared memory that processes map: made without a name in any folder where the system allows that.

Owns making, reserving and opening; knows no contents. Other processes open such a file through its maker's /proc entry, so
nothing is left behind whenever a process is killed. Systems without that use a temporary file, which `unlink` removes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def folder() -> str:
    """The folder of shared memory."""
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
