"""Packed file: what a loader has made of a checkpoint for one rank, in a file that later starts map instead of making it again.

Owns what a file was made for, which of its buffers a load takes, and when it is written: a while after the load, by a thread that
yields to all others. A file that was made for something else is replaced; one that is damaged too, with one sentence. What cannot
be written costs one sentence: the next start packs again. The file itself never changes: weights that do get memory of their own.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import platform
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread, get_native_id
from typing import Any, NamedTuple

import numpy as np
import xxhash

from vnext.base.spelling import reason
from vnext.kernels.cpu.memory import ALIGNMENT, in_place_of
from vnext.kernels.cpu.native import kernels
from vnext.models.config.folder import weight_files
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import linked_files
from vnext.models.loading.checkpoint import fingerprint

FORMAT_VERSION = 5  # of the file, and of what the loader puts into it under a name
SUFFIX = ".packed"
WRITE_AFTER_S = 1.0  # the first requests go first
CLOSE_WAIT_S = 3.0
LEAST_PRIORITY = 19
BESIDE = ".packed"
TIMES_FREE = 10
log = logging.getLogger(__name__)


def packed_folder(checkpoint: Path) -> Path | None:
    """Where packed weights lie that nobody has named a place for: those of a GGUF file in the folder that was made to show it, and
    which goes when the file does, if ten times its bytes are free there. None for nowhere."""
    size = sum(file.stat().st_size for file in linked_files(checkpoint))
    return checkpoint.parent / BESIDE if size and size * TIMES_FREE < shutil.disk_usage(checkpoint).free else None


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
            "format": FORMAT_VERSION, "kernels": kernels.BUILT_FROM.split()[0], "machine": platform.machine(),
            "checkpoint": fingerprint(self._checkpoint),
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}, "part": dict(self._part),
        }, sort_keys=True)  # fmt: skip

    def _open(self) -> Mapped | None:
        try:
            return open_packed(self.path, self._made_for)
        except (OSError, DamagedFile) as error:
            self._is_wrong = True
            log.warning("The packed weights in %s are not used (%s): they are packed and written again.", self.path, reason(error))
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
                "The packed weights cannot be written to %s (%s): make room there, or give --packed-weights-dir off; until then "
                "each start packs them again.", self.path.parent, reason(error),
            )  # fmt: skip
        except ModelError:
            return  # so has a checkpoint that is gone
        finally:
            self._copied.set()
            self._buffers = {}


# ---- the format ----------------------------------------------------------------------------------------------------
# The format of a file of packed weights: buffers side by side at whole pages, which a rank maps and computes with.
#
#     page 0     MAGIC, place and size of the index, a checksum of both and of the index
#     buffers    as the operations take them
#     index      JSON: what the file was made for, place and size of each buffer by name, a checksum of every PIECE_BYTES before
#
# A file is read whole when it is opened, which takes a fraction of what packing takes: bytes that a disk has damaged are noticed.
# It is written under another name, in pieces of whole huge pages, so that Linux keeps it in huge pages and maps it as such where
# the file system can, and renamed when it is on the disk.

MAGIC = b"vnext packed weights\n"
DRAFT = ".part"
DRAFT_AGE_MAX_S = 600.0  # of one that nobody writes any more
PIECE_BYTES = 8 << 20
CHECKERS = 2
_HEAD = struct.Struct("<24sQQ16s")


class DamagedFile(Exception):
    """A file is not as it was written: what is wrong, in a few words."""


class Mapped(NamedTuple):
    """A file in memory, uint8 [its size], and the buffers in it by name. Mapped privately: what is written goes into memory."""

    memory: np.ndarray
    buffers: dict[str, np.ndarray]


def open_packed(path: Path, made_for: str) -> Mapped | None:
    """Map a file; None for one that is not there or was made for something else. Raises DamagedFile, OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        index = _read_index(file.fileno())
        if index["made_for"] != made_for:
            return None
        area = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, dtype=np.uint8)
    end = index["end"]
    pieces = [memory[max(place, ALIGNMENT) : min(place + PIECE_BYTES, end)] for place in range(0, end, PIECE_BYTES)]
    with ThreadPoolExecutor(CHECKERS) as checkers:
        if list(checkers.map(xxhash.xxh3_64_hexdigest, pieces)) != index["sums"]:
            raise DamagedFile("some of its bytes have changed")
    return Mapped(memory, {name: memory[place : place + size] for name, (place, size) in index["buffers"].items()})


def is_made_for(path: Path, made_for: str) -> bool:
    """Whether there is a file that was made for this, by its index alone."""
    try:
        with path.open("rb") as file:
            return bool(_read_index(file.fileno())["made_for"] == made_for)
    except (OSError, DamagedFile):
        return False


def write_draft(path: Path, made_for: str, buffers: Mapping[str, np.ndarray], is_stopped: Callable[[], bool]) -> Path | None:
    """Write the file under another name, and return that; None where it was stopped. Reads the buffers, uint8 each, and removes
    what others have left half written. Raises OSError, with nothing left behind."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.*{DRAFT}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > DRAFT_AGE_MAX_S:
                left.unlink()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{DRAFT}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            if _write(file.fileno(), made_for, buffers, is_stopped):
                return draft
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    draft.unlink()
    return None


def finish(draft: Path, path: Path) -> None:
    """Give a draft its name once it is on the disk. Raises OSError, with nothing left behind."""
    try:
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _write(handle: int, made_for: str, buffers: Mapping[str, np.ndarray], is_stopped: Callable[[], bool]) -> bool:
    """Whether all has been written."""
    places, end = _places(buffers)
    sums = []
    for place, piece in _pieces([(places[name][0], buffer) for name, buffer in buffers.items()], end):
        if is_stopped():
            return False
        _write_all(handle, piece.data, place)
        sums.append(xxhash.xxh3_64_hexdigest(piece[max(place, ALIGNMENT) - place :].data))
    index = json.dumps({"made_for": made_for, "end": end, "buffers": places, "sums": sums}).encode()
    _write_all(handle, memoryview(index), end)
    _write_all(handle, memoryview(_head(end, index)), 0)
    return True


def _places(buffers: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[int, int]], int]:
    """Place and size of each buffer, and where the last one's pages end."""
    places, end = {}, ALIGNMENT
    for name, buffer in buffers.items():
        places[name] = end, len(buffer)
        end += -(-len(buffer) // ALIGNMENT) * ALIGNMENT
    return places, end


def _pieces(placed: list[tuple[int, np.ndarray]], end: int) -> Iterator[tuple[int, np.ndarray]]:
    """The file before its index, piece by piece with their places. A piece is valid until the next."""
    stage, start = np.zeros(PIECE_BYTES, dtype=np.uint8), 0
    for place, buffer in placed:
        done = 0
        while done < len(buffer):
            at = place + done - start
            if at >= PIECE_BYTES:
                yield start, stage
                stage[:], start = 0, start + PIECE_BYTES
                continue
            count = min(len(buffer) - done, PIECE_BYTES - at)
            stage[at : at + count] = buffer[done : done + count]
            done += count
    yield start, stage[: end - start]


def _head(end: int, index: bytes) -> bytes:
    numbers = struct.pack("<QQ", end, len(index))
    return _HEAD.pack(MAGIC, end, len(index), xxhash.xxh3_128_digest(numbers + index))


def _read_index(handle: int) -> dict[str, Any]:
    head = os.pread(handle, _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise DamagedFile("it is no file of packed weights")
    _, end, size, _ = _HEAD.unpack(head)
    if end + size != os.fstat(handle).st_size:
        raise DamagedFile("it is not as long as it was")
    index = os.pread(handle, size, end)
    if head != _head(end, index):
        raise DamagedFile("its header has changed")
    return dict(json.loads(index))


def _write_all(handle: int, data: memoryview, place: int) -> None:
    while len(data):
        count = os.pwrite(handle, data, place)
        data, place = data[count:], place + count
