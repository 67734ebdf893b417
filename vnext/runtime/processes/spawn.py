"""Spawn: a child's process, before anything is imported that takes longer than the process: the core starts its ranks so, whose
imports take longest. subprocesses.py makes a Child of it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vnext.runtime.processes.inherited import begin_process, open_standard_streams

if TYPE_CHECKING:
    from vnext.runtime.processes.forked import Forked

KILLED_TIMEOUT_S = 10.0


def spawn(
    module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run `python -P -m module arguments...`; returns at once. `environment` replaces ours (None: inherited). The child gets our
    `descriptors`, under the same numbers.

    Ctrl-C is blocked while the child starts and stays blocked in the child: there is no moment at which it could hit the child.
    """
    open_standard_streams()  # of a program that we are a part of: its child's pipes would become descriptors that others write to
    command = [sys.executable, "-P", "-m", module, *arguments]
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def kill(processes: Sequence[Forked]) -> None:
    """End them at once, whatever they do, and wait until they have ended, but not for ever: the system may hold one."""
    for process in processes:
        process.kill()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_TIMEOUT_S)


def ignore_interrupts() -> None:
    """Ignore SIGINT in this process and what it starts: the parent decides, by SIGTERM, whose effect this process has whatever
    its parent does with that signal. Main thread only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin_process()
