"""Lets tests stop an engine core in mid stream (tests/run/stops.py).

Python imports this module at start in every process that has this folder on its path; only engine cores heed it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def heed(stop: Path, asked: Path) -> None:
    """Stop as by SIGSTOP before the message to the ranks that the file `stop` counts down to; say when an operation has come."""
    from vnext.runtime.engine.executor import MpExecutor
    from vnext.runtime.engine.operations import Operations

    send, ask_all, left = MpExecutor.send, Operations.ask_all, 0

    def send_or_stop(self: MpExecutor, message: bytes) -> None:
        nonlocal left
        if stop.exists():
            left = int(stop.read_text())
            stop.unlink()
        if left:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGSTOP)
        send(self, message)

    def ask_all_and_say(self: Operations, came: list[Any]) -> None:
        ask_all(self, came)
        asked.touch()

    MpExecutor.send, Operations.ask_all = send_or_stop, ask_all_and_say  # type: ignore[method-assign]


if "vnext.runtime.engine.main" in sys.orig_argv and "STOPS" in os.environ:
    heed(Path(os.environ["STOPS"], "stop"), Path(os.environ["STOPS"], "asked"))
