"""Files in shared memory that processes map: made without a name in any folder where the system can do that.

Owns making, reserving and opening; knows no contents. Others open such a file through its maker's /proc entry, so that
whoever is killed, whenever, nothing is left behind. On systems without that it is a file for temporary things, to be
removed by `unlink`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def folder() -> str:
    """Where shared memory lives."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def create_file(kind: str) -> tuple[str, int, int | None]:
    """(name, its descriptor, the descriptor that the name stands for, None where the name is a path)."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        handle = os.open(folder(), flags | os.O_TMPFILE, 0o600)
    except (AttributeError, OSError):  # not Linux, or a file system without it
        path = f"{folder()}/vnext-{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        return path, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), None
    door = os.dup(handle)
    return f"/proc/{os.getpid()}/fd/{door}", handle, door


def unlink(name: str, door: int | None) -> None:
    """Let nobody else open it; who has it mapped keeps it."""
    if door is not None:
        os.close(door)
    elif not name.startswith("/proc/"):
        Path(name).unlink(missing_ok=True)


def reserve(handle: int, size_bytes: int) -> None:
    """Give the file its size, and its memory where the system can promise that. OSError for no room."""
    if hasattr(os, "posix_fallocate"):  # absent on macOS
        os.posix_fallocate(handle, 0, size_bytes)
    else:
        os.ftruncate(handle, size_bytes)
