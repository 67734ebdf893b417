"""Stacks of a process that hangs: it writes them itself when a signal asks for them, whatever its threads are doing.

Owns both sides and the signal. Python's faulthandler writes from the signal's handler, so a loop inside compiled code hides
nothing. A process that is stopped, or held inside the kernel, cannot write.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ASK = signal.SIGUSR1
WAIT_S, LOOK_S = 1.0, 0.02


def write_stacks_on_signal(path: str) -> None:
    """From now on the signal makes this process write the stacks of all its threads to the file, which is made now."""
    faulthandler.register(ASK, open(path, "wb", buffering=0))  # noqa: SIM115  # for as long as the process lives


def stacks_of(processes: Mapping[Path, int]) -> dict[Path, str]:
    """What the processes write, by the file of each; "" for one that writes nothing within a second."""
    for pid in processes.values():
        with suppress(ProcessLookupError):
            os.kill(pid, ASK)
    written, before = dict.fromkeys(processes, ""), None
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and not (all(written.values()) and written == before):
        time.sleep(LOOK_S)
        before, written = written, {path: _text(path) for path in processes}
    return written


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
