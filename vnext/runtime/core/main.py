"""The engine core's process: `python -m vnext.runtime.core.main`, started by launch.py.

Owns the order of a start: settings first, then the ranks' processes, whose imports take longest, then this process's own
imports. A SIGTERM during the start ends the ranks too: while they import they would notice only afterwards.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from vnext.exits import DONE, FAILED, FOLLOWED
from vnext.runtime.processes.rank_processes import start_ranks
from vnext.runtime.processes.run_dir import remove
from vnext.runtime.processes.subprocesses import enter_child, terminate_all
from vnext.runtime.settings import CoreSettings


def main() -> int:
    gc.disable()  # imported modules stay: searching them for garbage takes time
    settings = _settings(enter_child(last_act=lambda config: remove(_settings(config).run_dir)))
    signal.signal(signal.SIGTERM, _leave)
    ranks = start_ranks(settings.engine)
    try:
        from vnext.runtime.core.process import run

        gc.freeze()
        gc.enable()
    except SystemExit:
        terminate_all(ranks, grace_s=0.0)
        raise
    try:
        return run(settings, ranks)
    except Exception:  # a bug: another engine core may get on with other requests
        logging.exception("the engine core stopped")
        return FOLLOWED if settings.engine.max_restarts else FAILED


def _settings(config: bytes) -> CoreSettings:
    return msgspec.msgpack.decode(config, type=CoreSettings)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(DONE)


if __name__ == "__main__":
    sys.exit(main())
