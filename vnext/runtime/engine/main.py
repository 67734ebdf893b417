"""The engine core's process: `python -m vnext.runtime.engine.main`, started by launch.py.

Owns the order of a start: first the imports that ranks need too, then the ranks' processes, as many as the one argument says, which
are forks of this one and go on with theirs, then this process's own imports and its settings. Without an argument the settings come
first and say how many; so they do for a process that stands by, whose ranks get theirs when it takes the place of another one. A
SIGTERM during the start ends the ranks too: while they import they would notice only afterwards.
"""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn

from vnext.base.exits import DONE
from vnext.base.quick_tuples import quick_tuples
from vnext.base.undocumented import undocumented
from vnext.runtime.processes.forked import Forked, fork
from vnext.runtime.processes.spawn import ignore_interrupts, kill

RANK = "vnext.runtime.rank.main"


def main() -> int:
    gc.disable()  # imported modules stay: searching them for garbage takes time
    ignore_interrupts()
    signal.signal(signal.SIGTERM, _leave)
    early: list[Forked] = []
    try:
        with quick_tuples(), undocumented():
            from vnext.runtime.engine.beginning import begin
        gc.freeze()
        if all(fork(RANK, early) for _ in range(int(next(filter(str.isdigit, sys.argv[1:]), 0)))):
            return begin(early, sys.argv[1:])
    except SystemExit:
        kill(early)
        raise
    with quick_tuples():
        from vnext.runtime.rank.main import main as rank
    return rank()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(DONE)


if __name__ == "__main__":
    sys.exit(main())
