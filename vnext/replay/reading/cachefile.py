"""The cache beside a segment: which states the segment reaches, at which offsets, as bytes.

    cache = magic, record(snapshot), record(snapshot), ..., record(directory), offset of the directory u64

Derived and disposable: a cache with any defect is rebuilt. Owns the file's bytes and the check that they belong to the
segment as it is now; index.py owns their meaning. Records have the log's format (length, CRC32, payload).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from vnext.base.version import __version__
from vnext.log import codec
from vnext.log.codec import INDEX_SUFFIX as CACHE_SUFFIX, LogEnd, schema_digest
from vnext.log.log_bytes import impl
from vnext.log.log_plain import RECORD_HEAD
from vnext.replay.reading.step_counts import StepCounts
from vnext.state.digest import DIGEST_VERSION

MAGIC = b"vnextIDX"
CACHE_VERSION = 3
Progress = Callable[[int, int], None]  # bytes done, bytes in total
UNFINISHED_S = 3600.0
"""Writing a cache takes a moment; a temporary file older than this was abandoned."""
BYTES_MIN = 4 * 2**20
"""A cache may take this much, or as much as its segment if that is more."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A place between two frames of a segment: `offset` of the next frame in the segment, the chained digest before it,
    and the counters of the state there. `at` and `size` locate the snapshot's record in the cache; both are 0 where
    there is none, as at the segment's beginning.
    """

    offset: int
    chain: int
    sequence: int
    planned: int
    next_id: int
    at: int = 0
    size: int = 0


class Known(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The notes at entry number `entry`, the last entry before which all times are known. Timestamps are written after
    their frames, so an extended index continues from this entry."""

    entry: int
    step_counts: StepCounts
    latency: msgspec.Raw


class Directory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a cache says about its segment.

    `made_by`, `start`, `size` and `mtime_ns` identify the segment; `timestamps_size` and `timestamped` (whether any are
    usable) describe its timestamps. `entries` are its places in order; the last is where folding ended, and `stopped`
    says why ("" at the segment's last good byte). `step_counts` holds the counts and `latency` an encoded
    ClientLatency. `known` holds the notes at the place where known times end, or None if folding ended there.
    """

    made_by: tuple[int, str, int, int]
    start: int
    size: int
    mtime_ns: int
    entries: tuple[Entry, ...]
    end: LogEnd
    stopped: str
    step_counts: StepCounts
    latency: msgspec.Raw
    timestamps_size: int
    timestamped: bool
    known: Known | None


_decoder = msgspec.msgpack.Decoder(Directory)


def made_by() -> tuple[int, str, int, int]:
    """The values that must match for this code to use a cache."""
    return CACHE_VERSION, __version__, schema_digest(), DIGEST_VERSION


def cache_path(segment: Path) -> Path:
    return segment.with_suffix(CACHE_SUFFIX)


def forget_orphans(folder: Path) -> None:
    """Delete caches whose segment is gone (the oldest of a log get deleted), and unfinished caches of killed processes."""
    try:
        for path in folder.glob(f"*{CACHE_SUFFIX}"):
            if not path.with_suffix(codec.SEGMENT_SUFFIX).exists():
                path.unlink(missing_ok=True)
        for path in folder.glob(f"*{CACHE_SUFFIX}?*"):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink(missing_ok=True)
    except OSError:
        return


def bytes_max(segment_size: int) -> int:
    """The most bytes that all snapshots of one segment may take."""
    return max(BYTES_MIN, segment_size)


def write(path: Path, directory: Directory, snapshots: list[bytes]) -> bool:
    """Replace the cache atomically. Returns False if it cannot be written: a cache is never required.

    `snapshots` belong to the entries that have a size, in order.
    """
    parts = [MAGIC, *map(codec.seal, snapshots)]
    at = sum(map(len, parts))
    return replace_file(path, [*parts, codec.seal(msgspec.msgpack.encode(directory)), codec.digest_word.pack(at)])


def replace_file(path: Path, parts: Iterable[bytes]) -> bool:
    """Write a file with these parts atomically. Returns False, with the file unchanged, if it cannot be written."""
    try:
        fd, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    except OSError:
        return False
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            return False
        raise
    return True


def placed(entries: list[Entry], snapshots: list[bytes]) -> tuple[Entry, ...]:
    """The entries, with the offsets at which `write` places their snapshots. The first entry has no snapshot."""
    found, at = entries[:1], len(MAGIC)
    for entry, snapshot in zip(entries[1:], snapshots):
        found.append(msgspec.structs.replace(entry, at=at, size=RECORD_HEAD + len(snapshot)))
        at += RECORD_HEAD + len(snapshot)
    return tuple(found)


def read(path: Path) -> Directory | None:
    """The directory of a cache; None if the file is missing or damaged, or other code made it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - codec.digest_word.size))
            tail = file.read()
            at = codec.digest_word.unpack(tail)[0] if len(tail) == codec.digest_word.size else size
            if not len(MAGIC) <= at < size:
                return None
            file.seek(at)
            payload = _payload(file.read(size - at - codec.digest_word.size))
        found = None if payload is None else _decoder.decode(payload)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found if found is not None and found.made_by == made_by() and found.entries else None


def read_snapshot(path: Path, entry: Entry) -> bytes | None:
    """A snapshot's bytes; None if they are damaged or gone."""
    try:
        with path.open("rb") as file:
            file.seek(entry.at)
            return _payload(file.read(min(entry.size, path.stat().st_size)))
    except (OSError, ValueError, OverflowError):
        return None


def _payload(record: bytes) -> bytes | None:
    return record[RECORD_HEAD:] if impl.record_end(record, 0) == len(record) else None
