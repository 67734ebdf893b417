"""The engine core's process: `python -m vnext.runtime.core_main`, started by launch.py.

Owns the order of a start: settings first, then the ranks' processes, whose imports take longest, then this one's own. A
SIGTERM meanwhile ends the ranks too: they are importing, and would notice by themselves only when they have done so.
"""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from vnext.exits import DONE
from vnext.runtime.children import enter_child, terminate_all
from vnext.runtime.rank_children import start_ranks
from vnext.runtime.settings import CoreSettings


def main() -> int:
    gc.disable()  # what is imported stays: looking for garbage in it takes time
    settings = msgspec.msgpack.decode(enter_child(), type=CoreSettings)
    signal.signal(signal.SIGTERM, _leave)
    ranks = start_ranks(settings.engine)
    try:
        from vnext.runtime.core_process import run

        gc.freeze()
        gc.enable()
    except SystemExit:
        terminate_all(ranks, grace_s=0.0)
        raise
    return run(settings, ranks)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(DONE)


if __name__ == "__main__":
    sys.exit(main())
