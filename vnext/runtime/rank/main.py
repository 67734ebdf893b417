"""The rank process: `python -m vnext.runtime.rank.main`, started by the engine core's process.

Owns start-up and end of one rank: the imports before any message arrives, and the socket for its results. `serving.py` does
the work in between. The environment is set before the process starts (rank_processes.py). On a failure, or when another
rank it depends on has ended, it sends the engine core one sentence. A closed ring is the orderly end.
"""

from __future__ import annotations

import gc
import sys

import msgspec

from vnext.base.quick_tuples import quick_tuples
from vnext.models.errors import ModelError
from vnext.runtime.processes.subprocesses import PARENT_DIED_EXIT_CODE, enter_child, name_process, write_stacks_on_signal
from vnext.runtime.protocol.messages import RankFailed, encoder
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.ring.results import ResultsSender

START_ERRORS = ModelError, SettingsError, MemoryError
"""Failures that a user can fix: a broken checkpoint, an option that cannot work here, too little memory."""


def main() -> int:
    gc.disable()  # imported and loaded objects stay: searching them for garbage takes a quarter of the time of imports
    with quick_tuples():
        from vnext.runtime.rank.serving import serve  # while the engine core gets ready

    if sys.argv[1:]:
        name_process("vnext-standby")
    try:
        settings = msgspec.msgpack.decode(enter_child(), type=RankSettings)
    except EOFError:  # the engine core has ended before it needed this process
        return PARENT_DIED_EXIT_CODE
    name_process("vnext-rank")
    if settings.stack_file:
        write_stacks_on_signal(settings.stack_file)
    try:
        sender = ResultsSender(settings.results_address)
    except OSError:  # the engine core has ended
        return 3
    with sender as results:
        try:
            serve(settings, results)
        except START_ERRORS as error:
            results.send(encoder.encode(RankFailed(rank=settings.rank, message=str(error) or "memory lacks")))
            return 2
        except RankLost as error:  # the engine core, if it is alive, is about to notice by itself
            print(f"rank {settings.rank} stops: {error}", file=sys.stderr)
            results.send(encoder.encode(RankFailed(rank=settings.rank, message=str(error))))
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
