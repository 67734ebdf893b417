"""The tail: reads a growing log as far as it goes, and later continues from there.

Owns the files of a live log: where to begin, what is new, which segment follows. vnext/log/reading.py judges the bytes.
An incomplete last record is not damage here, because the rest may still come.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vnext.log.codec import MAGIC, SEGMENT_SUFFIX, Frame, SegmentStart, record_head, segment_name
from vnext.log.reading import BadRecord, Reading
from vnext.replay.reading.source import Log, UnusableLog, open_log, part_of, size_of

GONE = "is gone: the engine deletes the oldest of its log (--log-max-bytes), and this was not read in time"


def is_kept(path: Path) -> bool:
    """Whether a process of this machine keeps the log at `path`, or may: an engine locks its folder (record/retention.py)."""
    try:
        fd = os.open(path if path.is_dir() else path.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


class Damaged(Exception):
    """The log cannot be followed any further; the message is one sentence."""


def newest_log(folder: Path) -> Path:
    """The most recently written log directory in a folder of logs. Raises UnusableLog if there is none."""
    logs: dict[Path, float] = {}
    for path in sorted(folder.glob(f"*/*{SEGMENT_SUFFIX}")):
        with suppress(FileNotFoundError):  # the engine has deleted it since
            logs[path.parent] = path.stat().st_mtime
    if not logs:
        raise UnusableLog(f"{folder} holds no log: start a server, or give the directory of its log")
    return max(logs, key=logs.__getitem__)


def _newest(log: Log) -> Log:
    """The log from its newest segment on, or from the segment before it while the newest header is still being written."""
    try:
        return open_log(log.paths[-1])
    except UnusableLog:
        if len(log.paths) == 1:
            raise
        return open_log(log.paths[-2])


class Tail:
    """A live log. Mutable; begins with the newest segment, or with the first one if `whole`.

    `log` is the segment at which reading began, for its state. An unfinished record is not kept between two reads; it
    is read again. Whether a segment has ended is checked before its bytes are read, so if it has ended, the read is
    complete.
    """

    def __init__(self, path: Path, whole: bool = False) -> None:
        first = open_log(path)
        self.log: Log = open_log(first.paths[0]) if whole else _newest(first)
        self._path = self.log.paths[0]
        self._begin = 0
        self._reading = Reading(b"")
        self._opened = False
        self._before: Reading | None = None

    def news(self) -> Iterator[SegmentStart | Frame]:
        """Everything new since the last call. Raises Damaged if it cannot be read."""
        while True:
            following = self._path.with_name(segment_name(self.log.header.index + 1))
            ended = following.is_file()
            self._read(ended)
            yield from self._whole_records()
            if not ended or not self._opened:
                return
            if self._rest():
                raise Damaged(f"{self._path} ends inside a record, and another segment follows")
            if not self._follow(following):
                return

    def _read(self, ended: bool) -> None:
        """Read the file's bytes from the first unread record on."""
        self._begin += self._reading.offset
        self._reading.offset = 0
        try:
            self._reading.data = part_of(self._path, self._begin)
        except FileNotFoundError:
            if not ended:
                raise Damaged(f"{self._path} {GONE}") from None
            self._reading.data = b""  # the engine has deleted it: if unread data is lost, the next segment does not follow

    def _whole_records(self) -> Iterator[SegmentStart | Frame]:
        try:
            if not self._opened:
                yield self._reading.open(self._before)
                self._opened = True
            while self._rest():
                yield self._reading.frame()
        except BadRecord as bad:
            if bad.kind != "torn":
                raise Damaged(f"{self._path.name}: {bad}") from bad

    def _rest(self) -> int:
        return len(self._reading.data) - self._reading.offset

    def _follow(self, path: Path) -> bool:
        """Go on to the next segment; False while its header is still being written. Raises Damaged if the header is
        invalid."""
        try:
            if not _header_is_whole(path):
                return False
            self.log = open_log(path)
        except FileNotFoundError:
            raise Damaged(f"{path} {GONE}") from None
        except UnusableLog as error:
            raise Damaged(str(error)) from error
        self._before, self._path, self._begin, self._opened = self._reading, path, 0, False
        self._reading = Reading(b"")
        return True


def _header_is_whole(path: Path) -> bool:
    """Whether the file has as many bytes as its header declares, or its header is invalid."""
    start = part_of(path, 0, len(MAGIC) + record_head.size)
    if not MAGIC.startswith(start[: len(MAGIC)]):
        return True
    length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 4], "little")
    return len(start) == len(MAGIC) + record_head.size and size_of(path) >= len(start) + length
