"""Tail: a log that grows, read as far as it goes and then on from there.

Owns the files of a live log: where to begin, what is new, which segment follows. Bytes are judged by vnext/state/log_read.py;
a record that ends inside is not damage here, because the rest may still come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vnext.replay.source import Log, UnusableLog, open_log, part_of, size_of
from vnext.state.log import MAGIC, SEGMENT_SUFFIX, Frame, SegmentStart, record_head, segment_name
from vnext.state.log_read import BadRecord, Reading


class Damaged(Exception):
    """The log cannot be followed any further; one sentence."""


def newest_log(folder: Path) -> Path:
    """The log directory in a folder of logs that was written last. UnusableLog if there is none."""
    logs = {path.parent: path.stat().st_mtime for path in sorted(folder.glob(f"*/*{SEGMENT_SUFFIX}"))}
    if not logs:
        raise UnusableLog(f"{folder} holds no log: start a server, or give the directory of its log")
    return max(logs, key=logs.__getitem__)


def _newest(log: Log) -> Log:
    """The log from its newest segment on, or from the one before as long as that one's header is being written."""
    try:
        return open_log(log.paths[-1])
    except UnusableLog:
        if len(log.paths) == 1:
            raise
        return open_log(log.paths[-2])


class Tail:
    """A live log. Mutable; begins with the newest segment, or with the first one if `whole`.

    `log` is the segment where it began, for the state there.
    """

    def __init__(self, path: Path, whole: bool = False) -> None:
        first = open_log(path)
        self.log: Log = open_log(first.paths[0]) if whole else _newest(first)
        self._path = self.log.paths[0]
        self._size = 0
        self._reading = Reading(bytearray())
        self._opened = False
        self._before: Reading | None = None

    def news(self) -> Iterator[SegmentStart | Frame]:
        """All that has come since the last time. Damaged if it cannot be read."""
        while True:
            grown = self._read()
            yield from self._whole_records()
            if grown:
                continue
            following = self._path.with_name(segment_name(self.log.header.index + 1))
            if not self._opened or not following.is_file():
                return
            if self._rest():
                raise Damaged(f"{self._path} ends inside a record, and another segment follows")
            if not self._follow(following):
                return

    def _read(self) -> bool:
        """Take the file's new bytes; True if there were any."""
        try:
            data = part_of(self._path, self._size)
        except FileNotFoundError:
            following = self._path.with_name(segment_name(self.log.header.index + 1))
            if following.is_file():  # the ring has deleted it, and nothing of it was left to be read
                return False
            raise Damaged(f"{self._path} is gone") from None
        self._size += len(data)
        self._reading.data = bytes(self._reading.data[self._reading.offset :]) + data
        self._reading.offset = 0
        return bool(data)

    def _whole_records(self) -> Iterator[SegmentStart | Frame]:
        try:
            if not self._opened:
                yield self._reading.open(self._before)
                self._opened = True
            while self._rest():
                yield self._reading.frame()
        except BadRecord as bad:
            if bad.kind not in ("torn", "unusable") or (bad.kind == "unusable" and self._size > 64):
                raise Damaged(f"{self._path.name}: {bad}") from bad

    def _rest(self) -> int:
        return len(self._reading.data) - self._reading.offset

    def _follow(self, path: Path) -> bool:
        """Go on to the next segment; False while its header is still being written. Damaged if it is none."""
        try:
            self.log = open_log(path)
        except UnusableLog as error:
            if _header_is_whole(path):
                raise Damaged(str(error)) from error
            return False
        self._before, self._path, self._size, self._opened = self._reading, path, 0, False
        self._reading = Reading(b"")
        return True


def _header_is_whole(path: Path) -> bool:
    """Whether as many bytes are there as the header says it has."""
    start = part_of(path, 0, len(MAGIC) + record_head.size)
    length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + 4], "little")
    return not MAGIC.startswith(start[: len(MAGIC)]) or size_of(path) >= len(MAGIC) + record_head.size + length
