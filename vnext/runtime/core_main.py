"""The engine core's process: `python -m vnext.runtime.core_main`, started by launch.py.

Owns the order of a start: settings first, then the ranks' processes, whose imports take longest, then this one's own.
"""

from __future__ import annotations

import gc
import sys

import msgspec

from vnext.runtime.children import enter_child
from vnext.runtime.rank_children import start_ranks
from vnext.runtime.settings import CoreSettings


def main() -> int:
    gc.disable()  # what is imported stays: looking for garbage in it takes time
    settings = msgspec.msgpack.decode(enter_child(), type=CoreSettings)
    ranks = start_ranks(settings.engine)
    from vnext.runtime.core_process import run

    gc.freeze()
    gc.enable()
    return run(settings, ranks)


if __name__ == "__main__":
    sys.exit(main())
