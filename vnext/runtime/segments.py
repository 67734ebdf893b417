"""Segments: the files of one engine's log, a ring that is bounded by size and age.

Owns what is opened, written, cut off and deleted in one log directory. Every segment but the first begins with a
keyframe, so the oldest can go at any time and what is left still folds. A write that fails leaves the file as it was. A log
that is durable has each frame on the device before its effects: a power cut costs no more than a kill, and each step waits.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import msgspec

from vnext.runtime.packing import Packer
from vnext.runtime.stamps import StampFile, stamps_path
from vnext.state import log
from vnext.state.log import SegmentHeader

FILE_MODE = 0o600
FIRST_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEXT_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
KEYFRAME_SHARE = 4
"""A segment is at least so many times as long as its header, so that keyframes never are most of a log."""
RETRY_SHARE = 16
RENEW_S = 10.0
"""After a gap a segment ends when it is so old."""
WAITED_SHARE_MAX = 0.1
WAITED_MAX_NS = 10**9
NOTICED_NS = 10**6
"""An engine waits for a slow disk a tenth of its time, and a second beyond that; then frames are lost until it has caught up.
A write of less than a millisecond is no wait."""
SEGMENTS_MIN = 4
"""A bound on all segments is at least so many of them: a ring of few would forget much at once."""


class LogUnwritable(Exception):
    """The log directory cannot be written; one sentence with the remedy."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How long segments and the log may get: `max_bytes` and `max_age_s` of all segments, 0 for no such bound.

    A segment counts from its last frame. Segments are deleted when a new one starts, so an engine that does nothing
    deletes nothing.
    `stamped`: beside each segment lies when its frames were written (stamps.py), which goes with it. `durable`: a frame is
    written when the device has it. `packed`: closed segments are made smaller in the background (packing.py), and count as
    what they take then.
    """

    segment_bytes: int = log.SEGMENT_SIZE_BYTES
    max_bytes: int = 0
    max_age_s: float = 0.0
    stamped: bool = False
    durable: bool = False
    packed: bool = False

    @property
    def segment_bytes_max(self) -> int:
        """A segment's length: less than `segment_bytes` where the whole log may take little."""
        return min(self.segment_bytes, self.max_bytes // SEGMENTS_MIN) if self.max_bytes else self.segment_bytes

    @property
    def segment_age_s_max(self) -> float:
        """After so long a segment ends even if it is short: what is too old can go only with its segment."""
        return self.max_age_s / SEGMENTS_MIN


UNBOUNDED = Bounds()


def open_segments(log_dir: Path, header: SegmentHeader, bounds: Bounds) -> Segments:
    """Make the directory and the first segment. LogUnwritable if that fails or there is a log already."""
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
        """Bytes that it takes by now."""
        try:
            return self.path.stat().st_size
        except OSError:
            return self.size


class _Patience:
    """What was waited for the disk beyond its share of the time: `over_ns`. Mutable."""

    def __init__(self) -> None:
        self.over_ns = 0.0
        self._at_ns = 0
        self._is_out = False

    def is_out(self, now_ns: int) -> bool:
        """Whether the disk is too slow at present: from WAITED_MAX_NS on, until half of that is made up for."""
        self.over_ns = max(0.0, self.over_ns - WAITED_SHARE_MAX * (now_ns - self._at_ns))
        self._at_ns = now_ns
        self._is_out = self.over_ns > (WAITED_MAX_NS / 2 if self._is_out else WAITED_MAX_NS)
        return self._is_out

    def waited(self, from_ns: int, until_ns: int) -> None:
        """A write took so long."""
        self.is_out(from_ns)
        self.over_ns += until_ns - from_ns


class Segments:
    """The newest segment file, where the log stands in it, and the older ones.

    `is_due`: the next frame belongs into a new segment, because this one is full or old. `failure` is the last complaint.
    `stamps` are the newest segment's, None where there shall be none.
    """

    def __init__(self, log_dir: Path, header: SegmentHeader, bounds: Bounds) -> None:
        self._dir = log_dir
        self._bounds, self._durable = bounds, bounds.durable
        self._closed: deque[_Closed] = deque()
        self._fd = -1
        self._torn = False
        self.stamps: StampFile | None = None
        self._packer = Packer(bounds.durable) if bounds.packed else None
        self._patience = _Patience()
        self._written_event = header.first_event
        self._bytes_before = self._size = 0
        self.bytes_deleted = 0
        self.failure = ""
        self._start(header, FIRST_FLAGS)

    @property
    def bytes_written(self) -> int:
        """Of all segments, those that were deleted since included."""
        return self._bytes_before + self._size

    def start_next(self, keyframe: bytes) -> None:
        """Begin the next segment with the state in which its first frame comes; goes on in this one if that fails.

        It follows what was written, not what was lost: the frame after a gap explains the gap.
        """
        ended = _Closed(self._dir / log.segment_name(self._header.index), self._size, time.monotonic())
        try:
            if self._torn:
                self._cut()
            self._start(log.next_header(self._header, self._chain, self._written_event, keyframe), NEXT_FLAGS)
        except OSError as error:
            self.failure = str(error)
            self._full_at = self._size + self._bounds.segment_bytes_max // RETRY_SHARE
            self.is_due, self._old_at = False, 0.0
            return
        self._closed.append(ended)
        self._delete_oldest()
        if self._packer is not None:
            self.failure = self._packer.failure or self.failure
            self._packer.add(ended.path)

    def write(self, frame: bytearray, state_digest: int, next_event: int) -> None:
        """Complete a frame and append it; OSError if it could not be written whole: as if nothing had been written."""
        began_ns = time.monotonic_ns()
        if self._patience.over_ns and self._patience.is_out(began_ns):
            self.failure = "the disk is too slow for the log"
            raise OSError(self.failure)
        if self._torn:
            self._cut()
        digest, size = log.seal_frame(frame, self._chain, state_digest), len(frame)
        try:
            if (written := os.write(self._fd, frame)) != size:
                raise _cut_short(written, size)
            if self._durable:
                os.fdatasync(self._fd)
        except OSError as error:
            self._torn, self.failure = True, str(error)
            self._cut()
            raise
        now_ns = time.monotonic_ns()
        if now_ns - began_ns > NOTICED_NS and not self._durable:
            self._patience.waited(began_ns, now_ns)
        self._chain, self._written_event = digest, next_event
        self._size = reached = self._size + size
        if self.stamps is not None:
            self.stamps.add(next_event, now_ns)
        if reached >= self._full_at or (self._old_at and time.monotonic() > self._old_at):
            self.is_due = True

    def renew(self) -> None:
        """A gap is behind us, and replaying goes on from the next keyframe: the next segment begins soon, but not each time."""
        due = self._begun_s + RENEW_S
        self._old_at = min(self._old_at, due) if self._old_at else due
        self.is_due = self.is_due or time.monotonic() > due

    def close(self) -> None:
        if self._packer is not None:
            self._packer.close()
        self._let_go()

    def _let_go(self) -> None:
        if self.stamps is not None:
            self.stamps.close()
        os.close(self._fd)

    def _start(self, header: SegmentHeader, flags: int) -> None:
        data, chain = log.open_segment(header)
        path = self._dir / log.segment_name(header.index)
        fd = os.open(path, flags, FILE_MODE)
        try:
            _write_whole(fd, data, self._bounds.durable)
            if self._bounds.durable:
                _sync_folder(self._dir)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            self._let_go()
        self.stamps = StampFile(path) if self._bounds.stamped else None
        self._fd, self._header, self._chain = fd, msgspec.structs.replace(header, keyframe=b""), chain
        self._bytes_before += self._size
        self._size, self.is_due = len(data), False
        self._full_at = max(self._bounds.segment_bytes_max, KEYFRAME_SHARE * len(data))
        self._begun_s = time.monotonic()
        self._old_at = self._begun_s + self._bounds.segment_age_s_max if self._bounds.max_age_s else 0.0

    def _delete_oldest(self) -> None:
        """Keep the bounds, with room for the newest segment to grow."""
        while self._closed and self._is_too_much(self._closed[0]):
            try:
                self._delete(self._closed[0].path)
                stamps_path(self._closed[0].path).unlink(missing_ok=True)
            except OSError as error:
                self.failure = str(error)
                return
            self.bytes_deleted += self._closed.popleft().size

    def _delete(self, segment: Path) -> None:
        if self._packer is None:
            segment.unlink(missing_ok=True)
        else:
            self._packer.delete(segment)

    def _is_too_much(self, oldest: _Closed) -> bool:
        bounds = self._bounds
        if bounds.max_age_s and time.monotonic() - oldest.last_write_s > bounds.max_age_s:
            return True
        if not bounds.max_bytes:
            return False
        newest = self._full_at + self._full_at // RETRY_SHARE  # it ends with the frame that fills it
        if not bounds.packed:
            return sum(each.size for each in self._closed) + newest > bounds.max_bytes
        packing = self._closed[-1].size  # the packed form stands beside the plain one for a moment
        return sum(each.room() for each in self._closed) + newest + packing > bounds.max_bytes

    def _cut(self) -> None:
        """Take a half-written frame off again; as long as that fails nothing may follow it."""
        os.ftruncate(self._fd, self._size)
        self._torn = False


def _write_whole(fd: int, data: bytes, durable: bool) -> None:
    """One os.write; a short one is an error, because the rest could not follow at once. `durable`: up to the device."""
    if (written := os.write(fd, data)) != len(data):
        raise _cut_short(written, len(data))
    if durable:
        os.fdatasync(fd)


def _cut_short(written: int, size: int) -> OSError:
    return OSError(f"only {written} of {size} bytes were written")


def _sync_folder(folder: Path) -> None:
    """A new file's name reaches the device with its folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
