"""Packing: closed segments take less room, made so by a thread of its own while the engine works (format: vnext/state/packed.py).

Owns the thread and the moment in which a packed file takes the plain one's place. The compressor works outside the
interpreter's lock, a block at a time, and at the engine's priority: a thread of less could be put aside while it holds that lock.
A disk that fails, or a kill, leaves the plain segment and at most a file (*.packing) that nobody reads.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from vnext.state import packed

SUFFIX = ".packing"
FILE_MODE = 0o600


class Packer:
    """Packs the segments that it is given, one after the other. `failure` is the disk's last complaint."""

    def __init__(self, durable: bool = False) -> None:
        self._durable = durable
        self._wanted: queue.Queue[Path | None] = queue.Queue()
        self._changing = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vnext-log-packing", daemon=True)
        self.failure = ""
        self._thread.start()

    def add(self, segment: Path) -> None:
        """A segment that nobody writes any more."""
        self._wanted.put(segment)

    def delete(self, segment: Path) -> None:
        """Delete a segment; it does not come back. OSError if that fails."""
        with self._changing:
            segment.unlink(missing_ok=True)

    def finish(self) -> None:
        """Return when all that was given is packed."""
        self._wanted.put(None)
        self._thread.join()

    def close(self) -> None:
        """Stop within a block; what is not packed stays as it is."""
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
                    stat = segment.stat()  # it may have been deleted meanwhile
                    os.utime(made, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                    os.replace(made, segment)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.failure = str(error)
        made.unlink(missing_ok=True)

    def _written(self, segment: Path, made: Path) -> bool:
        """Write the packed form, with zeros behind it where it would be less than a reader believes; whether it takes less room."""
        lengths: list[int] = []
        with segment.open("rb") as source, open(made, "wb", opener=_private) as target:
            size = os.fstat(source.fileno()).st_size
            target.seek(packed.head_size(size))
            while block := source.read(packed.BLOCK_BYTES):
                if self._ends.is_set():
                    return False
                lengths.append(target.write(packed.pack_block(block)))
            taken = max(target.tell(), -(-size // packed.GROWTH_MAX))
            target.truncate(taken)
            target.seek(0)
            target.write(packed.head_of(size, lengths))
            if self._durable:
                target.flush()
                os.fdatasync(target.fileno())
        return taken < size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
