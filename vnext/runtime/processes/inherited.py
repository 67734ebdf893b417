"""Inherited: what a process has from the one that started it and could not work with: closed standard descriptors, signals that
are blocked or ignored, and a low limit of open files. The first call of a program's main.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress

STANDARD = (0, 1, 2)
TOLD_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
"""Signals that mean something to a process of vnext."""
FILES_MAX = 2**20
"""As many as Linux allows a process by default. No limit is raised beyond: some programs close as many files as they may open."""


def begin_process() -> None:
    """Open standard descriptors, signals that arrive, and as many files as the system allows."""
    open_standard_streams()
    accept_signals()
    raise_file_limit()


def open_standard_streams() -> None:
    """Open each closed one of the descriptors 0 to 2 on /dev/null: a socket must not become one of them."""
    while (handle := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, handle, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, open(handle, mode, encoding="utf-8", closefd=False))


def accept_signals() -> None:
    """Unblock the signals that end this process or tell it something, and let SIGTERM and the end of a child have their usual
    effects where the parent ignores them. Main thread only. An ignored SIGINT or SIGHUP stays so: shells and `nohup` mean it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD_BY)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def raise_file_limit() -> None:
    """Let this process and what it starts open as many files as the hard limit says: the soft one, often 1,024, stands for programs
    that use `select`, and ends a server with many connections."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if most == resource.RLIM_INFINITY else min(most, FILES_MAX)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
