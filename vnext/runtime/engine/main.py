"""The engine core's process: `python -m vnext.runtime.engine.main`, started by launch.py.

Owns the order of a start: settings first, then the ranks' processes, whose imports take longest, then this process's own
imports. A process that stands by gets its ranks' settings at once, and all of them when it takes the place of another one.
A SIGTERM during the start ends the ranks too: while they import they would notice only afterwards.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from vnext.base.exits import DONE, FAILED, FOLLOWED
from vnext.runtime.processes.rank_processes import start_ranks
from vnext.runtime.processes.run_dir import remove
from vnext.runtime.processes.subprocesses import (
    PARENT_DIED_EXIT_CODE,
    enter_child,
    ignore_interrupts,
    name_process,
    receive_config,
    terminate_all,
)
from vnext.runtime.protocol.settings import CoreSettings


def main() -> int:
    gc.disable()  # imported modules stay: searching them for garbage takes time
    ignore_interrupts()
    arguments = sys.argv[1:]
    settings = _settings(receive_config()) if arguments else _entered()
    signal.signal(signal.SIGTERM, _leave)
    ranks = start_ranks(settings.engine, (), arguments)
    try:
        from vnext.runtime.engine.process import run

        gc.freeze()
        gc.enable()
        if arguments:
            name_process("vnext-standby")
            settings = _entered()
    except SystemExit:
        terminate_all(ranks, grace_s=0.0)
        raise
    except EOFError:  # the launcher has died
        terminate_all(ranks, grace_s=0.0)
        remove(settings.run_dir)
        return PARENT_DIED_EXIT_CODE
    name_process("vnext-core")
    try:
        return run(settings, ranks)
    except Exception:  # a bug: another engine core may get on with other requests
        logging.exception("the engine core stopped")
        return FOLLOWED if settings.engine.max_restarts else FAILED


def _entered() -> CoreSettings:
    """The settings of the engine core that this process is from now on."""
    return _settings(enter_child(last_act=lambda config: remove(_settings(config).run_dir)))


def _settings(config: bytes) -> CoreSettings:
    return msgspec.msgpack.decode(config, type=CoreSettings)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(DONE)


if __name__ == "__main__":
    sys.exit(main())
