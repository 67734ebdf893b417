"""`python -m vnext.replay.reading.keep_index SEGMENT`: builds or extends a segment's index beside an engine that
serves.

Owns its own unobtrusiveness: it runs at the lowest priority, is the first to be killed when memory runs short, writes
nothing to a nearly full disk, and does not outlive the engine that started it. It sets its priority before any other
import.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

DONE, NOT_MADE = 0, 1
FREE_MIN = 512 * 2**20
"""Building an index leaves this many bytes of its disk free."""
NICE_MOST = 19


def main() -> int:
    """Returns 0 if there is an index, 1 if none could be built."""
    _give_way()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the engine stops this process
    signal.signal(signal.SIGTERM, _leave)
    return DONE if keep(Path(sys.argv[1]), os.getppid()) else NOT_MADE


def keep(segment: Path, engine: int) -> bool:
    """Whether the segment now has an index of all that it holds. Ends this process when `engine` is no longer its
    parent."""
    from vnext.replay.reading.cachefile import cache_path
    from vnext.replay.reading.index import Index
    from vnext.replay.reading.source import UnusableLog, open_log

    def proceed(done: int, total: int) -> None:
        if os.getppid() != engine:
            _leave()

    try:
        if not _has_room(segment):
            return False
        Index(open_log(segment), proceed).segments[0].made()
    except (UnusableLog, OSError):
        return False  # the segment is gone or its disk fails; opening the log reports that
    if not segment.exists():
        cache_path(segment).unlink(missing_ok=True)  # the engine has deleted the segment meanwhile
    return cache_path(segment).exists()


def _has_room(segment: Path) -> bool:
    """Whether the disk keeps FREE_MIN bytes if the index takes as much as it may."""
    from vnext.replay.reading.cachefile import bytes_max
    from vnext.replay.reading.source import size_of

    disk = os.statvfs(segment.parent)
    return disk.f_bavail * disk.f_frsize >= FREE_MIN + bytes_max(size_of(segment))


def _give_way() -> None:
    with suppress(OSError, AttributeError):  # not Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.nice(NICE_MOST)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _leave(number: int = 0, frame: object = None) -> NoReturn:
    raise SystemExit(NOT_MADE)


if __name__ == "__main__":
    sys.exit(main())
