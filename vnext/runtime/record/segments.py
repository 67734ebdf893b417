"""Segments: the files of one engine's log, a ring bounded by size and age.

Owns opening, writing, truncating and deleting in one log directory. Every segment but the first begins with a snapshot, so the
oldest can be deleted at any time and the rest still folds. A failed write leaves the file as it was. A durable log has each
frame on the device before the frame's effects: a power cut costs no more than a kill, and each step waits for the disk.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.log import codec
from vnext.log.codec import SegmentHeader
from vnext.runtime.record.compressor import Compressor, Indexer, next_due
from vnext.runtime.record.retention import lock_folder
from vnext.runtime.record.timestamp_file import TimestampFile, timestamps_path

FILE_MODE = 0o600
FIRST_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEXT_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
SNAPSHOT_SHARE = 4
"""The least ratio of a segment's length to its header's, so that snapshots never make up most of a log."""
RETRY_SHARE = 16
RENEW_S = 10.0
"""Age at which a segment ends after a gap."""
WAITED_SHARE_MAX = 0.1
WAITED_MAX_NS = 10**9
NOTICED_NS = 10**6
"""An engine waits for a slow disk a tenth of its time, plus one second; then frames are lost until the disk has caught up.
A write of less than a millisecond does not count."""
SEGMENTS_MIN = 4
"""A bound on all segments covers at least this many: a ring of few would forget much at once."""


class LogUnwritable(Exception):
    """The log directory cannot be written; one sentence with the remedy."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of segments and log: `max_bytes` and `max_age_s` of all segments, 0 for no bound.

    A segment's age counts from its last frame. Segments are deleted when a new one starts, so an idle engine deletes nothing.
    `timestamped`: a file beside each segment records when its frames were written (timestamp_file.py) and is deleted with it.
    `durable`: a frame counts as written when the device has it. `compressed`: closed segments are compressed in the background
    (compressor.py) and then count with their smaller size. `required`: every frame is written, however long that takes.
    `indexed`: the log tool's index is built beside long segments in the background (compressor.py); it counts too and is deleted
    with its segment. `starts_max` and `starts_bytes_max` bound the logs of all starts in one folder (retention.py).
    """

    segment_bytes: int = codec.SEGMENT_SIZE_BYTES
    max_bytes: int = 0
    max_age_s: float = 0.0
    timestamped: bool = False
    durable: bool = False
    compressed: bool = False
    required: bool = False
    indexed: bool = False
    starts_max: int = 0
    starts_bytes_max: int = 0

    @property
    def segment_bytes_max(self) -> int:
        """The length at which a segment ends: less than `segment_bytes` where the whole log has a small bound."""
        return min(self.segment_bytes, self.max_bytes // SEGMENTS_MIN) if self.max_bytes else self.segment_bytes

    @property
    def segment_age_s_max(self) -> float:
        """The age at which even a short segment ends: old frames can be deleted only with their segment."""
        return self.max_age_s / SEGMENTS_MIN


UNBOUNDED = Bounds()


def open_segments(log_dir: Path, header: SegmentHeader, bounds: Bounds) -> Segments:
    """Make the directory and the first segment. Raises LogUnwritable if that fails or a log exists already."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        return Segments(log_dir, header, bounds)
    except FileExistsError as error:
        raise LogUnwritable(f"{log_dir} holds a log already: give every engine start a directory of its own") from error
    except OSError as error:
        raise LogUnwritable(
            f"the log directory {log_dir} cannot be written ({error.strerror}): choose another one with --log-dir, or switch "
            "the log off with --log off"
        ) from error


class _Closed(msgspec.Struct, frozen=True):
    """A segment that is complete: `size` bytes were written, `last_write_s` on the monotonic clock."""

    path: Path
    size: int
    last_write_s: float

    def room(self) -> int:
        """Bytes that it takes at present, with its index."""
        return _size_of(self.path, self.size) + _size_of(index_path(self.path), 0)


def index_path(segment: Path) -> Path:
    """The path of a segment's index, which may not exist."""
    return segment.with_suffix(codec.INDEX_SUFFIX)


def _size_of(path: Path, unknown: int) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return unknown


class _Patience:
    """Time spent waiting for the disk beyond its share: `over_ns`. Mutable."""

    def __init__(self) -> None:
        self.over_ns = 0.0
        self._at_ns = 0
        self._is_out = False

    def is_out(self, now_ns: int) -> bool:
        """Whether the disk is too slow at present: from WAITED_MAX_NS on, until half of that has been made up."""
        self.over_ns = max(0.0, self.over_ns - WAITED_SHARE_MAX * (now_ns - self._at_ns))
        self._at_ns = now_ns
        self._is_out = self.over_ns > (WAITED_MAX_NS / 2 if self._is_out else WAITED_MAX_NS)
        return self._is_out

    def waited(self, from_ns: int, until_ns: int) -> None:
        """A write took from `from_ns` until `until_ns`."""
        self.is_out(from_ns)
        self.over_ns += until_ns - from_ns


class _Newest(msgspec.Struct, kw_only=True):
    """The segment that is written: its file, what the next frame follows (`chain`, at `size`; `before_last`: before the last frame
    that can be taken back, with `written_event`), and when it is full, old and indexed again (0.0: never old; monotonic clock).
    `torn`: half a frame may lie behind its end. Mutable."""

    fd: int
    header: SegmentHeader
    chain: int
    size: int
    full_at: int
    index_at: int
    begun_s: float
    old_at: float
    timestamps: TimestampFile | None
    before_last: tuple[int, int, int] | None = None
    torn: bool = False

    def cut(self) -> None:
        """Truncate a half-written frame; until that succeeds, nothing may follow it."""
        os.ftruncate(self.fd, self.size)
        self.torn = False

    def let_go(self) -> None:
        if self.timestamps is not None:
            self.timestamps.close()
        os.close(self.fd)


class Segments:
    """The newest segment file, the write position in it, and the older segments.

    `is_due`: the next frame belongs in a new segment, because this one is full or old. `failure` is the last error.
    `written_event` is the number behind the last written event.
    """

    def __init__(self, log_dir: Path, header: SegmentHeader, bounds: Bounds) -> None:
        self._dir = log_dir
        self._bounds, self._durable = bounds, bounds.durable
        self._closed: deque[_Closed] = deque()
        self._lock = lock_folder(log_dir)
        self._compressor = Compressor(bounds.durable) if bounds.compressed else None
        self._indexer = Indexer() if bounds.indexed else None
        self._patience = _Patience()
        self.written_event = header.first_event
        self._bytes_before = self._frames = 0
        self.bytes_deleted = 0
        self.failure = ""
        try:
            self.newest = self._started(header, FIRST_FLAGS)
        except OSError:
            self._unlock()
            raise

    @property
    def bytes_written(self) -> int:
        """Bytes written to all segments, including deleted ones."""
        return self._bytes_before + self.newest.size

    def start_next(self, snapshot: bytes) -> None:
        """Begin the next segment with the state before its first frame; on failure, continue the current segment.

        The new segment follows the written frames, not the lost ones: the frame after a gap explains the gap.
        """
        newest = self.newest
        ended = _Closed(self._dir / codec.segment_name(newest.header.index), newest.size, time.monotonic())
        try:
            if newest.torn:
                newest.cut()
            header = codec.next_header(newest.header, newest.chain, self.written_event, snapshot, self._frames)
            self.newest = self._started(header, NEXT_FLAGS)
        except OSError as error:
            self.failure = reason(error, with_file=True)
            newest.full_at, newest.old_at = newest.size + self._bounds.segment_bytes_max // RETRY_SHARE, 0.0
            self.is_due = False
            return
        newest.let_go()
        self._bytes_before += newest.size
        self._closed.append(ended)
        self._delete_oldest()
        if self._compressor is not None:
            self.failure = self._compressor.failure or self.failure
            self._compressor.add(ended.path)
        if self._indexer is not None and ended.size >= next_due(0):
            self._indexer.add(ended.path)

    def write(self, frame: bytearray, state_digest: int, next_event: int, patient: bool = False) -> None:
        """Complete a frame and append it. Raises OSError, with the file unchanged, if the frame could not be written whole.

        `patient`: write however slow the disk is at present.
        """
        began_ns = time.monotonic_ns()
        if self._patience.over_ns and not patient and self._patience.is_out(began_ns):
            self.failure = "the disk is too slow for the log"
            raise OSError(self.failure)
        newest = self.newest
        if newest.torn:
            newest.cut()
        digest, size = codec.seal_frame(frame, newest.chain, state_digest), len(frame)
        try:
            if (written := os.write(newest.fd, frame)) != size:
                raise _cut_short(written, size)
            if self._durable:
                os.fdatasync(newest.fd)
        except OSError as error:
            newest.torn, self.failure = True, reason(error, with_file=True)
            newest.cut()
            raise
        now_ns = time.monotonic_ns()
        if now_ns - began_ns > NOTICED_NS and not self._durable:
            self._patience.waited(began_ns, now_ns)
        newest.before_last = newest.size, newest.chain, self.written_event
        newest.chain, self.written_event = digest, next_event
        newest.size = reached = newest.size + size
        self._frames += 1
        if newest.timestamps is not None:
            newest.timestamps.add(next_event, now_ns)
        if reached >= newest.full_at or (newest.old_at and time.monotonic() > newest.old_at):
            self.is_due = True
        if self._indexer is not None and reached >= newest.index_at:
            newest.index_at = next_due(reached)
            self._indexer.add(self._dir / codec.segment_name(newest.header.index))

    def take_last_back(self) -> bool:
        """Truncate the last frame, to free its room. Returns False if this segment has none."""
        newest = self.newest
        if newest.before_last is None:
            return False
        newest.size, newest.chain, self.written_event = newest.before_last
        newest.before_last, newest.torn = None, True
        self._frames -= 1
        return True

    def mark_gap(self, is_open: bool) -> None:
        """Note in the folder, as far as the disk allows it, whether frames are lost that no frame counts yet."""
        with suppress(OSError):
            (self._dir / codec.GAP_NAME).touch(FILE_MODE) if is_open else (self._dir / codec.GAP_NAME).unlink(missing_ok=True)

    def renew(self) -> None:
        """After a gap, folding can go on only from the next snapshot: let the next segment begin soon, but not after every
        gap."""
        newest, due = self.newest, self.newest.begun_s + RENEW_S
        newest.old_at = min(newest.old_at, due) if newest.old_at else due
        self.is_due = self.is_due or time.monotonic() > due

    def close(self) -> None:
        if self._compressor is not None:
            self._compressor.close()
        if self._indexer is not None:
            self._indexer.close()
        self.newest.let_go()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _started(self, header: SegmentHeader, flags: int) -> _Newest:
        data, chain = codec.open_segment(header)
        path = self._dir / codec.segment_name(header.index)
        fd = os.open(path, flags, FILE_MODE)
        try:
            _write_whole(fd, data, self._bounds.durable)
            if self._bounds.durable:
                _sync_folder(self._dir)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self.is_due, begun_s = False, time.monotonic()
        return _Newest(
            fd=fd, header=msgspec.structs.replace(header, snapshot=b""), chain=chain, size=len(data),
            full_at=max(self._bounds.segment_bytes_max, SNAPSHOT_SHARE * len(data)),
            index_at=next_due(0) if self._indexer is not None else sys.maxsize, begun_s=begun_s,
            old_at=begun_s + self._bounds.segment_age_s_max if self._bounds.max_age_s else 0.0,
            timestamps=TimestampFile(path) if self._bounds.timestamped else None,
        )  # fmt: skip

    def _delete_oldest(self) -> None:
        """Delete segments to keep the bounds, with room for the newest segment to grow."""
        while self._closed and self._is_too_much(self._closed[0]):
            try:
                self._delete(self._closed[0].path)
                timestamps_path(self._closed[0].path).unlink(missing_ok=True)
                index_path(self._closed[0].path).unlink(missing_ok=True)
            except OSError as error:
                self.failure = reason(error, with_file=True)
                return
            self.bytes_deleted += self._closed.popleft().size

    def _delete(self, segment: Path) -> None:
        if self._compressor is None:
            segment.unlink(missing_ok=True)
        else:
            self._compressor.delete(segment)

    def _is_too_much(self, oldest: _Closed) -> bool:
        bounds = self._bounds
        if bounds.max_age_s and time.monotonic() - oldest.last_write_s > bounds.max_age_s:
            return True
        if not bounds.max_bytes:
            return False
        newest = self.newest.full_at + self.newest.full_at // RETRY_SHARE  # the frame that fills a segment is its last
        if bounds.indexed and newest >= next_due(0):
            newest *= 2  # an index takes at most as much as its segment
        if not bounds.compressed and not bounds.indexed:
            return sum(each.size for each in self._closed) + newest > bounds.max_bytes
        packing = (
            self._closed[-1].size if bounds.compressed else 0
        )  # the compressed form stands beside the plain one for a moment
        return sum(each.room() for each in self._closed) + newest + packing > bounds.max_bytes

def _write_whole(fd: int, data: bytes, durable: bool) -> None:
    """One os.write; a short one is an error, because the rest could not follow at once. `durable`: also sync to the device."""
    if (written := os.write(fd, data)) != len(data):
        raise _cut_short(written, len(data))
    if durable:
        os.fdatasync(fd)


def _cut_short(written: int, size: int) -> OSError:
    return OSError(f"only {written} of {size} bytes were written: there is no more room")


def _sync_folder(folder: Path) -> None:
    """Sync the folder, with which a new file's name reaches the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
