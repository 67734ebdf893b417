"""What a log holds that another engine core has written and that nobody writes any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vnext.log.codec import SEGMENT_SUFFIX, Frame
from vnext.log.compression import Content
from vnext.log.reading import Skim, read


def frames_held(log_dir: Path | str) -> int:
    """The whole frames in the segments of a log; 0 where there is no log, or none that can be read."""
    counts = (
        item.counts.frames if isinstance(item, Skim) else isinstance(item, Frame) for item in read(_segments(log_dir), skim=True)
    )
    return sum(counts)


def _segments(log_dir: Path | str) -> Iterator[bytes]:
    """The oldest first. One that is deleted meanwhile, or cannot be read, ends them."""
    for path in sorted(Path(log_dir).glob(f"*{SEGMENT_SUFFIX}")) if log_dir else ():
        try:
            with path.open("rb") as file:
                content = Content(file)
                yield content.read(0, content.size)
        except OSError:
            return
