"""Where a log comes from: a directory of segments or one segment file, opened lazily.

Owns the reading of files and the one kind of error that a user can mend. Bytes are judged by `vnext.state.log_read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from vnext.state import packed
from vnext.state.log import MAGIC, SEGMENT_SUFFIX, LogEnd, SegmentHeader, SegmentStart, record_head
from vnext.state.log_read import Item, read


class UnusableLog(Exception):
    """This input cannot be answered from: one sentence with the value and the remedy."""


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """A log that has at least a header. `items` starts a new reading each time."""

    paths: tuple[Path, ...]
    header: SegmentHeader
    chain: int

    @property
    def size_bytes(self) -> int:
        """Bytes that were written, whatever room they take now."""
        return sum(map(size_of, self.paths))

    def items(self, skim: bool = False) -> Iterator[Item]:
        """A reading of the log; with `skim` as in log_read.read."""
        return read(contents(self.paths), skim)


def open_log(path: Path) -> Log:
    """The log at a path. UnusableLog if there is none."""
    paths = _segments(path)
    first = next(iter(read([_head(paths[0])])))
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
    logs = sorted({found.parent.name for found in path.glob(f"*/*{SEGMENT_SUFFIX}")})
    return f": it holds the logs {', '.join(logs[-5:])}; name one of them" if logs else ": give a log directory"


def _head(path: Path) -> bytes:
    """The bytes of a segment's header, if it has one."""
    try:
        with path.open("rb") as file:
            content = packed.Content(file)
            size = int.from_bytes(content.read(len(MAGIC), 4), "little")
            return content.read(0, len(MAGIC) + record_head.size + min(size, content.size))
    except OSError as error:
        raise UnusableLog(f"{path} cannot be read: {error}") from error


def part_of(path: Path, at: int = 0, count: int | None = None) -> bytes:
    """So many bytes of a segment from a place on, packed or not. OSError."""
    with path.open("rb") as file:
        return packed.Content(file).read(at, count)


def size_of(path: Path) -> int:
    """Bytes of a segment, which may be packed. OSError."""
    with path.open("rb") as file:
        return packed.Content(file).size


def contents(paths: tuple[Path, ...]) -> Iterator[bytes]:
    """The bytes of segments, read one at a time."""
    for path in paths:
        try:
            yield part_of(path)
        except OSError as error:
            raise UnusableLog(f"{path} cannot be read: {error}") from error
