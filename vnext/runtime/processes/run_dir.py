"""The run directory: one start's folder for sockets, below the folder for temporary files, removed when the start ends. It may have
a second one in shared memory, with blocks for other engines.

Owns its creation, its removal, and the removal of directories that killed starts have left. A start holds a lock on a file in
its folder for as long as it lives, however it ends; a folder of this user whose lock is free belongs to a dead start. Also holds
the notes that an engine core leaves for those who start its successor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vnext.runtime.processes import shared_file
from vnext.runtime.processes.forks import keep_from_forks

PREFIX = "vnext-"
LOCK_NAME = "vnext.lock"
READY, PROGRESS, SUSPECT, REFUSAL = "core.ready", "core.progress", "core.suspect", "core.refusal"
WEIGHTS = "core.weights"
LOADED = "loaded"
"""How many hundredths of the weights the first rank has, while it loads them."""
LEAVE = signal.SIGUSR1
"""Ends an engine core in whose place another one is started."""


class RunDir:
    """A new run directory, locked. Removes those of dead starts."""

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _sweep(folder)
        self.path, self._lock = _make()
        keep_from_forks(self)

    @property
    def own_descriptors(self) -> tuple[int | None]:
        """The lock, which belongs to this process alone (forks.py)."""
        return (self._lock if self._lock >= 0 else None,)

    def remove(self) -> None:
        """Remove it. Idempotent."""
        remove(self.path)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove(path: Path | str) -> None:
    """Remove a run directory and the one in shared memory, with their contents; does nothing if they are gone."""
    shutil.rmtree(shared_twin(path), ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def shared_twin(path: Path | str) -> Path:
    """The folder in shared memory that belongs to a run directory, which those make who need it."""
    return Path(shared_file.folder()) / f"{Path(path).name}-blocks"


def _make() -> tuple[Path, int]:
    """A new folder and its lock's descriptor."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _is_taken(lock) and (path / LOCK_NAME).exists():
            return path, lock
        os.close(lock)  # another start's sweep came between the file and its lock and removes the folder


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove a folder if it is a run directory of this user and no process holds its lock."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # no lock file in it: an unrelated folder, or a start that is making it now
    try:
        if _is_taken(lock):
            remove(folder)
    finally:
        os.close(lock)


class CoreNotes:
    """What an engine core notes in its run directory as it happens, because it may be killed at any time: that it is ready, that it
    has sent a token, why it refuses its settings, and the name of the request that it is about to begin, if it had better not be
    that one. `folder` "": nowhere.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder) if folder else None

    def write(self, name: str, text: str = "") -> None:
        if self._folder is not None:
            with suppress(OSError):  # a full disk: the note is missing, and nothing else
                (self._folder / name).write_text(text)

    def replace(self, name: str, text: str) -> None:
        """As `write`, but the note before is there until this one is there as a whole. Raises OSError."""
        if self._folder is not None:
            part = self._folder / f"{name}.part"
            part.write_text(text)
            part.replace(self._folder / name)

    def path(self, name: str) -> str:
        """Where a file of this name lies in the run directory."""
        return str((self._folder or Path()) / name)

    def is_beside(self, path: str) -> bool:
        """Whether a file lies in the run directory."""
        return self._folder is not None and Path(path).parent == self._folder

    def erase(self, name: str) -> None:
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)

    def text(self, name: str) -> str | None:
        """A note's text; None if there is none."""
        try:
            return (self._folder / name).read_text() if self._folder is not None else None
        except OSError:
            return None

    def age_s(self, name: str) -> float:
        """For how long a note has been there, in seconds; 0 if it is not."""
        try:
            return max(0.0, time.time() - (self._folder / name).stat().st_mtime) if self._folder is not None else 0.0
        except OSError:
            return 0.0


# ---- folders that nobody has named a place for -------------------------------------------------------------------
# Where logs, overlays and models go: below the home; models below XDG_DATA_HOME where that is set. A container may run as a user
# without a home, or with one that cannot be written: then a folder of this user below the folder for temporary files serves, and
# the caller says so.

DATA, DATA_VARIABLE = "~/.local/share/", "XDG_DATA_HOME"


class StateDir(NamedTuple):
    """A folder, and why it is not the usual one ("" if it is)."""

    path: Path
    why: str = ""


def state_dir(usual: str) -> StateDir:
    """The folder for `usual`, which begins with "~/" and ends with a name of its own. Makes nothing below it.

    Raises OSError where the stand-in, too, cannot be had.
    """
    path = os.path.expanduser(usual)
    if usual.startswith(DATA) and os.path.isabs(data := os.environ.get(DATA_VARIABLE, "")):
        path = os.path.join(data, usual.removeprefix(DATA))
    if not os.path.isabs(path):
        return StateDir(_stand_in(Path(usual).name), "this user has no home")
    if not _can_be_made(Path(path)):
        return StateDir(_stand_in(Path(usual).name), f"{path} cannot be written")
    return StateDir(Path(path))


def _can_be_made(folder: Path) -> bool:
    found = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return os.path.isdir(found) and os.access(found, os.W_OK | os.X_OK)


def _stand_in(name: str) -> Path:
    """The folder of this name below this user's own in the folder for temporary files, where others may write too."""
    own = Path(tempfile.gettempdir()) / f"vnext_state_{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "it belongs to another user", str(own))
    return own / name
