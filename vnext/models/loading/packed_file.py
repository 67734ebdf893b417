"""Packed file: what a loader has made of a checkpoint for one rank, in a file that later starts map instead of making it again.

Owns what a file was made for, which of its buffers a load takes, and when it is written: a while after the load, by a thread that
yields to all others. A file that was made for something else is replaced; one that is damaged too, with one sentence. What cannot
be written costs one sentence: the next start packs again. The file itself never changes: weights that do get memory of their own.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread, get_native_id

import numpy as np

from vnext.kernels.cpu.memory import in_place_of
from vnext.kernels.cpu.native import module
from vnext.models.config.folder import weight_files
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import fingerprint
from vnext.models.loading.packed_format import DamagedFile, Mapped, finish, is_made_for, open_packed, write_draft

FORMAT_VERSION = 1  # of the file, and of what the loader puts into it under a name
SUFFIX = ".packed"
WRITE_AFTER_S = 1.0  # the first requests go first
CLOSE_WAIT_S = 3.0
LEAST_PRIORITY = 19
log = logging.getLogger(__name__)


class PackedFile:
    """The buffers of one rank by name, from the file or for it. `find`, `keep` and then `write_soon` belong to one load."""

    def __init__(self, folder: Path, checkpoint: Path, part: Mapping[str, str]) -> None:
        """`part`: which part of the checkpoint, in what numbers. Each has a file of its own. Raises ModelError."""
        name = blake2b(f"{checkpoint.resolve()} {sorted(part.items())}".encode(), digest_size=8).hexdigest()
        self.path = folder / f"{checkpoint.name}-{name}{SUFFIX}"
        self._checkpoint, self._part = checkpoint, part
        self._made_for = self._purpose()
        self._is_wrong = False  # the file that is there, although made for this
        self._mapped = self._open()
        self._buffers: dict[str, np.ndarray] = {}
        self._lacks = False
        self._hurried, self._stopped, self._copied = Event(), Event(), Event()
        self._writer: Thread | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether weights lie in the file."""
        return self._mapped is not None

    def find(self, name: str, size_bytes: int) -> np.ndarray | None:
        """The buffer of this name and size in the file, uint8; None where there is none."""
        found = self._mapped.buffers.get(name) if self._mapped is not None else None
        if found is None or len(found) != size_bytes:
            return None
        self._buffers[name] = found
        return found

    def keep(self, name: str, buffer: np.ndarray) -> None:
        """Put a buffer, uint8, into the next file. It must not change before `let_go`."""
        self._buffers[name] = buffer
        self._lacks, self._is_wrong = True, self._is_wrong or self.is_mapped

    def write_soon(self) -> None:
        """Write the file beside what follows, where something was kept that it lacks."""
        if self._lacks:
            self._writer = Thread(target=self._write, name="packed-file", daemon=True)
            self._writer.start()

    def let_go(self) -> None:
        """The weights are about to change, all of them. What lay in the file gets memory of its own, of zeros, where it is; a file
        that is being written is not finished, unless all of it has been read."""
        self._stop()
        if self._mapped is not None:
            in_place_of(self._mapped.memory)
            self._mapped = None
        self._buffers = {}

    def close(self) -> None:
        """Finish a file that is being written, if it takes no longer than CLOSE_WAIT_S."""
        self._hurried.set()
        if self._writer is not None:
            self._writer.join(CLOSE_WAIT_S)
            self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        self._hurried.set()
        if self._writer is not None:
            self._copied.wait()

    def _purpose(self) -> str:
        """All that the bits of a file depend on."""
        stats = {file.name: file.stat() for file in weight_files(self._checkpoint)}
        return json.dumps({
            "format": FORMAT_VERSION, "kernels": module().BUILT_FROM.split()[0], "machine": platform.machine(),
            "checkpoint": fingerprint(self._checkpoint),
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}, "part": dict(self._part),
        }, sort_keys=True)  # fmt: skip

    def _open(self) -> Mapped | None:
        try:
            return open_packed(self.path, self._made_for)
        except (OSError, DamagedFile) as error:
            self._is_wrong = True
            reason = error.strerror if isinstance(error, OSError) else error
            log.warning("The packed weights in %s are not used (%s): they are packed and written again.", self.path, reason)
            return None

    def _write(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), LEAST_PRIORITY)  # of this thread, on Linux
        self._hurried.wait(WRITE_AFTER_S)
        try:
            if self._purpose() != self._made_for:
                return  # the checkpoint has changed since it was read
            if not self._is_wrong and is_made_for(self.path, self._made_for):
                return  # another engine has written the same
            draft = write_draft(self.path, self._made_for, self._buffers, self._stopped.is_set)
            self._copied.set()
            if draft is not None:
                finish(draft, self.path)
        except OSError as error:
            log.warning(
                "The packed weights cannot be written to %s (%s): make room there, or leave --packed-weights-dir out; until then "
                "each start packs them again.", self.path.parent, error.strerror or error,
            )  # fmt: skip
        except ModelError:
            return  # so has a checkpoint that is gone
        finally:
            self._copied.set()
            self._buffers = {}
