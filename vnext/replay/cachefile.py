"""The cache beside a segment: where in it which state was reached, as bytes.

    cache = magic, record(keyframe), record(keyframe), ..., record(directory), offset of the directory u64

Derived and disposable: whatever is wrong with it, it is made anew. Owns its bytes and the question whether they belong to
a segment as it is now; what is in them is index.py's. Records are those of the log (length, CRC32, payload).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from vnext.replay.tally import Tally
from vnext.state import log
from vnext.state.digest import DIGEST_VERSION
from vnext.state.log import LogEnd
from vnext.state.log_forms import kernels
from vnext.state.log_plain import RECORD_HEAD
from vnext.state.log_schema import schema_digest
from vnext.version import __version__

CACHE_SUFFIX = ".vnextcache"
MAGIC = b"vnextIDX"
CACHE_VERSION = 2
BYTES_MIN = 4 * 2**20
"""A cache may take this much, or as much as its segment if that is more."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A place between two frames of a segment: `offset` of the next one in the segment, the chained digest before it,
    and what the state there has counted. `at` and `size` of its keyframe's record in the cache; 0 where there is none,
    as at the segment's begin."""

    offset: int
    chain: int
    sequence: int
    planned: int
    next_id: int
    at: int = 0
    size: int = 0


class Directory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a cache says of its segment: which one it is (`made_by`, `start`, `size`, `mtime_ns`), its places in order, the
    last one where folding ended, and why it ended there (`stopped`, "" if with the segment's last good byte)."""

    made_by: tuple[int, str, int, int]
    start: int
    size: int
    mtime_ns: int
    entries: tuple[Entry, ...]
    end: LogEnd
    stopped: str
    tally: Tally


_decoder = msgspec.msgpack.Decoder(Directory)


def made_by() -> tuple[int, str, int, int]:
    """What must be equal for a cache to be of use to this code."""
    return CACHE_VERSION, __version__, schema_digest(), DIGEST_VERSION


def cache_path(segment: Path) -> Path:
    return segment.with_suffix(CACHE_SUFFIX)


def forget_orphans(folder: Path) -> None:
    """Delete caches whose segment is gone, as the oldest of a log go."""
    for path in folder.glob(f"*{CACHE_SUFFIX}"):
        if not path.with_suffix(log.SEGMENT_SUFFIX).exists():
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return


def bytes_max(segment_size: int) -> int:
    """What the keyframes of one segment may take together."""
    return max(BYTES_MIN, segment_size)


def write(path: Path, directory: Directory, keyframes: list[bytes]) -> bool:
    """Replace the cache at once, or not at all. False where nothing can be written: a cache is never needed.

    `keyframes` belong to the entries that have a size, in order.
    """
    parts = [MAGIC, *map(log.seal, keyframes)]
    at = sum(map(len, parts))
    return replace_file(path, [*parts, log.seal(msgspec.msgpack.encode(directory)), log.digest_word.pack(at)])


def replace_file(path: Path, parts: Iterable[bytes]) -> bool:
    """The file with these parts at once, or as it was. False where nothing can be written."""
    try:
        fd, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    except OSError:
        return False
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        return False
    return True


def placed(entries: list[Entry], keyframes: list[bytes]) -> tuple[Entry, ...]:
    """The entries with the places that `write` gives their keyframes, the first entry having none."""
    found, at = entries[:1], len(MAGIC)
    for entry, keyframe in zip(entries[1:], keyframes):
        found.append(msgspec.structs.replace(entry, at=at, size=RECORD_HEAD + len(keyframe)))
        at += RECORD_HEAD + len(keyframe)
    return tuple(found)


def read(path: Path) -> Directory | None:
    """The directory of a cache; None where there is no such file, or it is damaged, or made by other code."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - log.digest_word.size))
            tail = file.read()
            at = log.digest_word.unpack(tail)[0] if len(tail) == log.digest_word.size else size
            if not len(MAGIC) <= at < size:
                return None
            file.seek(at)
            payload = _payload(file.read(size - at - log.digest_word.size))
        found = None if payload is None else _decoder.decode(payload)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if found is not None and found.made_by == made_by() and found.entries else None


def read_keyframe(path: Path, entry: Entry) -> bytes | None:
    """A keyframe's bytes; None where they are damaged or gone."""
    try:
        with path.open("rb") as file:
            file.seek(entry.at)
            return _payload(file.read(min(entry.size, path.stat().st_size)))
    except (OSError, ValueError, OverflowError):
        return None


def _payload(record: bytes) -> bytes | None:
    return record[RECORD_HEAD:] if kernels.record_end(record, 0) == len(record) else None
