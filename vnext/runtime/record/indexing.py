"""Indexing: builds the log tool's index of a segment while the engine serves, in a separate process at the lowest priority.

Owns the thread that starts that process, one at a time, and decides when one is due. An index is a cache (reading/cachefile.py):
if it is missing or too short, the tool builds the rest when it opens the log, so failures here are ignored. The engine pays
only for the start of a process, about a millisecond per several megabytes of log.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

BYTES_MIN = 4 * 2**20
"""A shorter segment gets no index here: reading it takes about as long as starting the process."""
GROWTH_SHARE = 4
"""The newest segment's index is extended when it lacks BYTES_MIN and one part in GROWTH_SHARE of its length."""
MAKER = "vnext.replay.reading.keep_index"
STOP_TIMEOUT_S = 5.0


def next_due(size: int) -> int:
    """The segment's length at which its index is due again, after it was requested at `size`; 0 for a new segment."""
    return size + max(BYTES_MIN, size // GROWTH_SHARE)


class Indexer:
    """Indexes segments one after the other. A segment requested again while it is being indexed is indexed once more."""

    def __init__(self, maker: str = MAKER) -> None:
        self._command = [sys.executable, "-P", "-m", maker]
        self._wanted: queue.Queue[Path | None] = queue.Queue()
        self._changing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="vnext-log-indexing", daemon=True)
        self._thread.start()

    def add(self, segment: Path) -> None:
        """Request an index for a segment that has grown, or that is no longer written."""
        self._wanted.put(segment)

    def finish(self) -> None:
        """Return when all given segments are indexed, as far as they can be."""
        self._wanted.put(None)
        self._thread.join()

    def close(self) -> None:
        """Stop at once; segments not indexed yet stay so."""
        with self._changing:
            self._ended = True
            if self._process is not None:
                self._process.terminate()
        self._wanted.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _work(self) -> None:
        while (segment := self._wanted.get()) is not None:
            with suppress(OSError):  # the system cannot start a process at present
                self._index(segment)
            self._wanted.task_done()

    def _index(self, segment: Path) -> None:
        nothing = subprocess.DEVNULL
        with self._changing:
            if self._ended:
                return
            self._process = subprocess.Popen([*self._command, str(segment)], stdin=nothing, stdout=nothing, stderr=nothing)
        self._process.wait()
        with self._changing:
            self._process = None
