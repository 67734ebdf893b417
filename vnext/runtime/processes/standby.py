"""Standby processes: started ahead, so that those that take the place of others need no time for their imports.

Owns them until they are taken. They are started a while after `prepare`, when what was lost has been computed again, and wait
for their settings; what they hold is the memory of their imports. Their names tell what they do: vnext-standby once they wait, and
vnext-core or vnext-rank from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vnext.base.spelling import reason
from vnext.runtime.processes.subprocesses import Child, terminate_all

AFTER_S = 10.0
STANDBY = "standby"
"""The argument of a process that stands by."""
log = logging.getLogger(__name__)


class Standby:
    """The processes that `start()` makes, one set at a time. Mutable; methods may be called from any thread."""

    def __init__(self, start: Callable[[], list[Child]]) -> None:
        self._start, self._is_closed = start, False
        self._children: list[Child] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def prepare(self) -> None:
        """Start them in a while. Those that there are must have been taken."""
        self._timer = threading.Timer(AFTER_S, self._fill)
        self._timer.daemon = True
        self._timer.start()

    def take(self) -> list[Child]:
        """All of them, which belong to the caller now; none if they were not started yet, or if one has ended."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            children, self._children = self._children, []
        if all(child.process.poll() is None for child in children):
            return children
        terminate_all(children, grace_s=0.0)
        return []

    def close(self) -> None:
        """End them, and start no more. Idempotent."""
        self._is_closed = True
        terminate_all(self.take(), grace_s=0.0)

    def _fill(self) -> None:
        with self._lock:
            if self._is_closed or self._children:
                return
            try:
                self._children = self._start()
            except OSError as error:
                log.warning("No process stands by: %s", reason(error, with_file=True))
