"""The beginning of an engine core's process, once its ranks' processes run: its settings, its own imports, its name, its end.
Imports what ranks need too, before they are forked.

A process that stands by gets its ranks' settings at once, and all of them when it takes the place of another one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from vnext.base.exits import FAILED, FOLLOWED
from vnext.base.quick_tuples import quick_tuples
from vnext.log import snapshot
from vnext.runtime.batch import fed
from vnext.runtime.hosts import wire
from vnext.runtime.hosts.handover import tickets
from vnext.runtime.processes.rank_processes import name_of, start_ranks
from vnext.runtime.processes.run_dir import remove
from vnext.runtime.processes.standby import STANDBY
from vnext.runtime.processes.subprocesses import (
    PARENT_DIED_EXIT_CODE,
    Child,
    enter_child,
    name_process,
    receive_config,
    terminate_all,
)
from vnext.runtime.protocol import messages, reasons
from vnext.runtime.protocol.settings import CoreSettings
from vnext.runtime.transport.ring import broadcast, results, writer
from vnext.state import digest, reduce

if TYPE_CHECKING:
    from vnext.runtime.processes.subprocesses import Process

SHARED = broadcast, digest, fed, messages, reasons, reduce, results, snapshot, tickets, wire, writer
"""What else ranks and engine cores both import, with all that it needs."""


def begin(early: Sequence[Process], arguments: Sequence[str]) -> int:
    """Run an engine core with the ranks that have been started; returns the exit status."""
    stands_by = STANDBY in arguments
    ranks = [Child(name_of(rank), process) for rank, process in enumerate(early)]
    settings = _settings(receive_config()) if stands_by else _entered()
    ranks = ranks or start_ranks(settings.engine, (), arguments if stands_by else ())
    try:
        with quick_tuples():
            from vnext.runtime.engine.process import run

        gc.freeze()
        gc.enable()
        if stands_by:
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
