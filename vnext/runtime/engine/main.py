"""The engine core's process: `python -m vnext.runtime.engine.main`, started by launch.py.

Owns the order of a start: the ranks' processes first, whose imports take longest, as many as the one argument says, then this
process's own imports and its settings. Without an argument the settings come first and say how many; so they do for a process that
stands by, whose ranks get theirs when it takes the place of another one. A SIGTERM during the start ends the ranks too: while they
import they would notice only afterwards.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

from vnext.base.exits import DONE
from vnext.runtime.processes.spawn import ignore_interrupts, kill, spawn


def main() -> int:
    gc.disable()  # imported modules stay: searching them for garbage takes time
    ignore_interrupts()
    signal.signal(signal.SIGTERM, _leave)
    early: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(int(next(filter(str.isdigit, sys.argv[1:]), 0))):
            early.append(spawn("vnext.runtime.rank.main"))
        from vnext.runtime.engine.beginning import begin
        return begin(early, sys.argv[1:])
    except SystemExit:
        kill(early)
        raise


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(DONE)


if __name__ == "__main__":
    sys.exit(main())
