"""Retention: deletes the logs of earlier starts beyond a number of starts, or of bytes.

Owns the lock by which an engine keeps its log: an exclusive flock on the folder, which the kernel drops when the process ends,
however it ends. A folder is deleted only if its name is a start's, this user owns it, nobody holds its lock, and it has
nothing in it but the files of a log.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from vnext.base.spelling import reason
from vnext.log import codec, pseudonyms

START = re.compile(r"\d{8}-\d{6}-\d+-\d+")
"""The name of a start's folder (processes/launch.py); names sort by time."""
PART = re.compile(r"segment-\d+\.\w+|decisions-[\d-]+\.\w+|(rank|stacks|profile-).*|" + codec.GAP_NAME)
"""The files of a log: segments, timestamps, indices, what a kill left of a compression, a router's decisions, stacks of ranks,
profiles, the mark of a gap."""

logger = logging.getLogger(__name__)


def lock_folder(folder: Path) -> int:
    """Keep a folder's log for as long as the returned descriptor is open, and its process lives; -1 if it cannot be locked
    (another process reads it to delete it, or a file system without such locks: retention then leaves every folder alone)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


def forget(log_dir: Path, starts_max: int, bytes_max: int) -> None:
    """Delete the oldest starts beside `log_dir`, the newest of them, so that at most `starts_max` are left, which have at most
    `bytes_max` (0: no such bound). One that cannot be deleted is left and counts."""
    if not (starts_max or bytes_max):
        return
    try:
        found = sorted((each for each in log_dir.parent.iterdir() if START.fullmatch(each.name) and each != log_dir), reverse=True)
    except OSError as error:
        logger.warning("earlier logs are not looked at, because their folder cannot be read: %s", reason(error, with_file=True))
        return
    count, size = 1, _size_of(log_dir)
    for folder in found:
        count, size = count + 1, size + _size_of(folder)
        if (starts_max and count > starts_max) or (bytes_max and size > bytes_max):
            own = _size_of(folder)
            if _delete(folder):
                count, size = count - 1, size - own


def _delete(folder: Path) -> bool:
    """Delete one start's folder and the key beside it, if it may be; returns whether it is gone."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or (lock := lock_folder(folder)) < 0:
            return False
    except OSError:
        return False
    try:
        parts = list(os.scandir(folder))
        if not all(PART.fullmatch(part.name) and part.is_file(follow_symlinks=False) for part in parts):
            return False
        for part in parts:
            os.unlink(part.path)
        folder.rmdir()
        folder.with_name(pseudonyms.name_key_file(folder.name)).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the log %s is left, because it cannot be deleted: %s", folder, reason(error))
        return False
    finally:
        os.close(lock)
    return True


def _size_of(folder: Path) -> int:
    """Bytes that a folder's files take; 0 for one that cannot be read."""
    try:
        return sum(part.stat(follow_symlinks=False).st_blocks * 512 for part in os.scandir(folder))
    except OSError:
        return 0
