"""Timestamps: the file beside a log's segment that records when each frame was written (format: vnext/log/timestamps.py).

A frame's timestamp is written right after it, so a log that ends with a kill has the times of all its frames: some bytes at the
file's end, which become a block once they are many or a second old. A failing disk costs timestamps and nothing else.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from vnext.log.timestamps import MAGIC, STEP_BIT, TimestampEncoder, head, stamp, timestamps_name

FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
BLOCK_FRAMES = 512
BLOCK_NS = 10**9
frame_behind_step = struct.Struct("<4Q")


def timestamps_path(segment: Path) -> Path:
    return segment.with_name(timestamps_name(segment.name))


class TimestampFile:
    """The timestamps of one segment. Mutable.

    The first `_size` bytes are blocks; the open bytes follow, up to `_end`, and `_open` holds a copy of them. `_results` are
    pairs of the open form that wait for their frame.
    """

    def __init__(self, segment: Path) -> None:
        self._path = timestamps_path(segment)
        wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        self._timestamp_encoder = TimestampEncoder(wall_ns - monotonic_ns)
        self._head = head.pack(MAGIC, wall_ns, monotonic_ns)
        self._open: list[bytes] = []
        self._results: tuple[int, ...] = ()
        self._size = self._end = self._event = 0
        self._due_ns = monotonic_ns + BLOCK_NS
        self._fd = -1
        self._is_usable = True

    def add(self, next_event: int, now_ns: int) -> None:
        """A frame that ends before this event was written now. A frame without events gets no timestamp."""
        if next_event == self._event:
            return
        results, opened, self._event = self._results, self._open, next_event
        if len(results) == 2:
            data = frame_behind_step.pack(*results, next_event, now_ns)
        else:
            data = struct.pack(f"<{len(results) + 2}Q", *results, next_event, now_ns)
        self._results = ()
        opened.append(data)
        if now_ns >= self._due_ns or len(opened) > BLOCK_FRAMES:
            self._due_ns = now_ns + BLOCK_NS
            self._end_block()
        elif self._is_usable:
            self._write(data if len(opened) > 1 else self._head + data)

    def took(self, step: int, seconds: float) -> None:
        """Rank 0 was busy with a step for `seconds`."""
        self._results += (step | STEP_BIT, int(seconds * 1e9))

    def close(self) -> None:
        """End the last block; it includes the result of a step whose frame goes into the next segment."""
        self._open.append(struct.pack(f"<{len(self._results)}Q", *self._results))
        self._end_block(last=True)
        if self._fd >= 0:
            os.close(self._fd)

    def _end_block(self, last: bool = False) -> None:
        """Turn the open bytes into a block, in place. A kill in between leaves the block and, behind it, bytes nothing reads."""
        timestamp_encoder = self._timestamp_encoder
        for number, ns in stamp.iter_unpack(b"".join(self._open)):
            if number & STEP_BIT:
                timestamp_encoder.took(number ^ STEP_BIT, ns // 1000)
            else:
                timestamp_encoder.add(number, ns // 1000)
        if last:
            timestamp_encoder.set_apart()
        timestamp_encoder.end_block()
        self._open.clear()
        if self._is_usable and timestamp_encoder.data:
            self._write(timestamp_encoder.data, self._size)
            self._size += len(timestamp_encoder.data)
        timestamp_encoder.data.clear()

    def _write(self, data: bytes | bytearray, at: int = -1) -> None:
        """Write at the file's end, or at `at`, which moves the end. A failing disk loses the data, and everything after a
        partial write: times are not worth an error."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, FLAGS, FILE_MODE)
            place = self._end if at < 0 else at
            self._is_usable = os.pwrite(self._fd, data, place) == len(data)
            self._end = place + len(data)
            if at >= 0:
                os.ftruncate(self._fd, self._end)
        except OSError:
            self._is_usable = False
