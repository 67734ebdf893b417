"""What a log holds that another engine core has written and that nobody writes any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vnext.log.codec import MAGIC, SEGMENT_SUFFIX, Frame, SegmentHeader, SegmentStart, record_head
from vnext.log.compression import Content
from vnext.log.reading import Skim, read


def frames_held(log_dir: Path | str) -> int:
    """The whole frames in the segments of a log; 0 where there is no log, or none that can be read.

    A segment's header says how many frames came before it. The newest segment with a header that can be read is therefore the only
    one whose frames are counted, and the time is bounded by a segment's size. Logs of earlier versions are read from their
    beginning.
    """
    paths = sorted(Path(log_dir).glob(f"*{SEGMENT_SUFFIX}")) if log_dir else []
    oldest = _oldest_header(paths)
    if oldest is None or oldest.frames_before < 0:
        return _counted(_contents(paths))[1]
    for path in reversed(paths):
        header, frames = _counted(_contents([path]))
        if header is not None and header.frames_before >= 0:
            return header.frames_before + frames - oldest.frames_before
    return 0


def _oldest_header(paths: Sequence[Path]) -> SegmentHeader | None:
    """Without the frames behind it; None where it cannot be read."""
    head_size = len(MAGIC) + record_head.size
    try:
        with paths[0].open("rb") as file:
            content = Content(file)
            head = content.read(0, head_size)
            size = record_head.unpack_from(head, len(MAGIC))[0] if len(head) == head_size else 0
            return _counted([content.read(0, head_size + size)])[0]
    except (OSError, IndexError):
        return None


def _counted(segments: Iterator[bytes] | Sequence[bytes]) -> tuple[SegmentHeader | None, int]:
    """The first segment's header, None where it cannot be read, and the whole frames of all of them."""
    header, frames = None, 0
    for item in read(segments, skim=True):
        match item:
            case SegmentStart():
                header = header or item.header
            case Skim():
                frames += item.counts.frames
            case Frame():
                frames += 1
    return header, frames


def _contents(paths: Sequence[Path]) -> Iterator[bytes]:
    """The oldest first. One that is deleted meanwhile, or cannot be read, ends them."""
    for path in paths:
        try:
            with path.open("rb") as file:
                content = Content(file)
                yield content.read(0, content.size)
        except OSError:
            return
