"""The source of a log: a directory of segments or one segment file, opened lazily.

Owns reading the files, and the one kind of error that a user can fix. `vnext.log.reading` judges the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.log import compression
from vnext.log.codec import MAGIC, SEGMENT_SUFFIX, LogEnd, SegmentHeader, SegmentStart, record_head
from vnext.log.reading import Item, read


class UnusableLog(Exception):
    """This input cannot be used: one sentence with the value and the remedy."""


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """A log that has at least a header. `items` starts a new reading on each call."""

    paths: tuple[Path, ...]
    header: SegmentHeader
    chain: int

    @property
    def size_bytes(self) -> int:
        """Bytes that were written, regardless of compression."""
        return sum(map(size_of, self.paths))

    def items(self, skim: bool = False) -> Iterator[Item]:
        """Read the log; `skim` is as in log.reading.read."""
        return read(contents(self.paths), skim)


def open_log(path: Path) -> Log:
    """Open the log at a path. Raises UnusableLog if there is none."""
    paths = _segments(path)
    head = _head(paths[0])
    while head is None:  # a running engine has deleted its oldest segment
        before, paths = paths, _segments(path)
        if paths == before:
            raise UnusableLog(f"{paths[0]} cannot be read: it is a link to nothing")
        head = _head(paths[0])
    first = next(iter(read([head])))
    if not isinstance(first, SegmentStart):
        raise UnusableLog(f"{paths[0]} cannot be read: {_message(first)}")
    return Log(paths=paths, header=first.header, chain=first.chain)


def _message(item: Item) -> str:
    return item.message if isinstance(item, LogEnd) else "it holds no header"


def _segments(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise UnusableLog(f"there is no log at {path}: give a log directory or one segment file")
    paths = tuple(sorted(path.glob(f"*{SEGMENT_SUFFIX}")))
    if not paths:
        raise UnusableLog(f"{path} holds no segment (*{SEGMENT_SUFFIX}){_nested(path)}")
    return paths


def _nested(path: Path) -> str:
    found = [*path.glob(f"*/*{SEGMENT_SUFFIX}"), *path.glob(f"engine-*/*/*{SEGMENT_SUFFIX}")]
    logs = sorted({each.parent.relative_to(path).as_posix() for each in found}, key=lambda name: name.rpartition("/")[2])
    return f": it holds the logs {', '.join(logs[-5:])}; name one of them" if logs else ": give a log directory"


def _head(path: Path) -> bytes | None:
    """The bytes of a segment's header, if it has one; None if the file is gone."""
    try:
        with path.open("rb") as file:
            content = compression.Content(file)
            size = int.from_bytes(content.read(len(MAGIC), 4), "little")
            return content.read(0, len(MAGIC) + record_head.size + min(size, content.size))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableLog(f"{path} cannot be read ({reason(error)})") from error


def part_of(path: Path, at: int = 0, count: int | None = None) -> bytes:
    """`count` bytes of a segment from offset `at`, compressed or not. Raises OSError."""
    with path.open("rb") as file:
        return compression.Content(file).read(at, count)


def size_of(path: Path) -> int:
    """The size of a segment in bytes, before compression. Raises OSError."""
    with path.open("rb") as file:
        return compression.Content(file).size


def contents(paths: tuple[Path, ...]) -> Iterator[bytes]:
    """The bytes of the segments, read one at a time."""
    for path in paths:
        try:
            yield part_of(path)
        except OSError as error:
            raise UnusableLog(f"{path} cannot be read ({reason(error)})") from error
