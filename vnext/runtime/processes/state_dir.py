"""State folders: where logs, overlays and models go that a user has named no place for.

That is below the home; for models below XDG_DATA_HOME where that is set. A container may run as a user without a home, or with one
that cannot be written: then a folder of this user below the folder for temporary files serves, and the caller says so.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

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
