"""Compressor: makes closed segments smaller, in its own thread while the engine works (format: log/compression.py).

Owns the thread and the moment at which a compressed file replaces the plain one. Compression runs outside the interpreter's
lock, a block at a time, and at the engine's priority: a thread of lower priority could be descheduled while it holds that lock.
A failing disk, or a kill, leaves the plain segment and at most a file (*.packing) that nothing reads.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from vnext.base.spelling import reason
from vnext.log import compression

SUFFIX = ".packing"
FILE_MODE = 0o600


class Compressor:
    """Compresses the segments it is given, one after the other. `failure` is the disk's last error."""

    def __init__(self, durable: bool = False) -> None:
        self._durable = durable
        self._wanted: queue.Queue[Path | None] = queue.Queue()
        self._changing = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vnext-log-packing", daemon=True)
        self.failure = ""
        self._thread.start()

    def add(self, segment: Path) -> None:
        """Compress a segment that is no longer written."""
        self._wanted.put(segment)

    def delete(self, segment: Path) -> None:
        """Delete a segment for good. Raises OSError if that fails."""
        with self._changing:
            segment.unlink(missing_ok=True)

    def finish(self) -> None:
        """Return when all given segments are compressed."""
        self._wanted.put(None)
        self._thread.join()

    def close(self) -> None:
        """Stop within a block; segments not compressed yet stay as they are."""
        self._ends.set()
        self.finish()

    def _work(self) -> None:
        while (segment := self._wanted.get()) is not None:
            if not self._ends.is_set():
                self._pack(segment)
            self._wanted.task_done()

    def _pack(self, segment: Path) -> None:
        made = segment.with_suffix(SUFFIX)
        try:
            if self._written(segment, made):
                with self._changing:
                    stat = segment.stat()  # it may have been deleted in the meantime
                    os.utime(made, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                    os.replace(made, segment)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.failure = reason(error, with_file=True)
        made.unlink(missing_ok=True)

    def _written(self, segment: Path, made: Path) -> bool:
        """Write the compressed form, padded with zeros to the least size a reader accepts. Returns whether it takes less room."""
        lengths: list[int] = []
        with segment.open("rb") as source, open(made, "wb", opener=_private) as target:
            size = os.fstat(source.fileno()).st_size
            target.seek(compression.head_size(size))
            while block := source.read(compression.BLOCK_BYTES):
                if self._ends.is_set():
                    return False
                lengths.append(target.write(compression.compress_block(block)))
            taken = max(target.tell(), -(-size // compression.GROWTH_MAX))
            target.truncate(taken)
            target.seek(0)
            target.write(compression.head_of(size, lengths))
            if self._durable:
                target.flush()
                os.fdatasync(target.fileno())
        return taken < size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


# ---- an index of each --------------------------------------------------------------------------------------------
# The log tool's index is built while the engine serves, in a separate process at the lowest priority. It is a cache
# (reading/cachefile.py): if it is missing or too short, the tool builds the rest when it opens the log, so failures here are
# ignored. The engine pays only for the start of a process, about a millisecond per several megabytes of log.

BYTES_MIN = 4 * 2**20
"""A shorter segment gets no index here: reading it takes about as long as starting the process."""
GROWTH_SHARE = 8
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
