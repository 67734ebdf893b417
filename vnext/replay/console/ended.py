"""How a log ends: complete, killed, with frames lost, or damaged, and where. One line and one verdict for all commands.

Owns the wording. The facts come from the reader (vnext/log/reading.py). A command that folds only a part of a log, or
stops early, reports the same end as one that reads all of it. Existing indexes (index.py) avoid the reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from vnext.log import codec, log_bytes
from vnext.log.codec import Frame, LogEnd
from vnext.log.reading import Skim
from vnext.replay.console.render import counted
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import Log, open_log, part_of, size_of

Kind = Literal["complete", "killed", "lost", "damaged"]
WORST_LAST: tuple[Kind, ...] = ("complete", "killed", "lost", "damaged")


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """`line` begins with "complete", "killed", "frames lost", "incomplete" or "damaged", and says where and what is missing."""

    kind: Kind
    line: str

    @property
    def is_sound(self) -> bool:
        """Whether everything that the engine decided up to the end is here. What a kill cuts off had no effect."""
        return self.kind in ("complete", "killed")


COMPLETE = Ended(kind="complete", line="complete")
INCOMPLETE = "incomplete: the disk was full or failed at the end, and the engine has not counted the frames that it lost there"
UNCLOSED = "killed, or still running: the engine has not closed this log; what it wrote is whole"


def ended(log: Log) -> Ended:
    """How a log ends: by its indexes if they cover it all, otherwise by reading it through (no frame is folded)."""
    last = _last_indexed(log)
    if last is None:
        found = _read_through(log)
    else:
        found = COMPLETE if _is_closed(log, last) else Ended(kind="killed", line=UNCLOSED)
    has_gap = found.kind in ("killed", "lost") and log.paths[-1].with_name(codec.GAP_NAME).exists()
    return Ended(kind="lost", line=f"{INCOMPLETE}; {found.line}") if has_gap else found


def ended_all(found: Sequence[Ended], names: Sequence[str]) -> Ended:
    """The worst end of several logs, in a line that names each incomplete one."""
    if len(found) == 1:
        return found[0]
    worst = max(found, key=lambda each: WORST_LAST.index(each.kind), default=COMPLETE)
    reported = [f"{name}: {each.line}" for name, each in zip(names, found) if each.kind != "complete"]
    return Ended(kind=worst.kind, line="; ".join(reported) or "complete")


# ---- read through ------------------------------------------------------------------------------------------------


def _read_through(log: Log) -> Ended:
    frames, next_event, lost, end = 0, log.header.first_event, [], None
    for item in log.items(skim=True):
        if isinstance(item, Skim):
            frames, next_event = frames + item.counts.frames, item.counts.next_event
        elif isinstance(item, Frame):
            if item.lost:
                lost.append((frames, item))
            frames, next_event = frames + 1, item.first_event + len(item.events)
        elif isinstance(item, LogEnd):
            end = item
    assert end is not None, "every reading ends with a LogEnd"
    parts = [_lost_words(lost, frames)] if lost else []
    kind: Kind = "lost" if lost else "complete"
    if end.kind == "torn":
        kind = "lost" if lost else "killed"
        parts.append(f"killed behind frame {frames - 1}: of the next one only {counted(end.ignored_bytes, 'byte')} were written")
    elif end.kind != "complete":
        kind = "damaged"
        place = f"frame {frames}, segment {end.segment}, byte {end.offset_bytes:,}"
        parts.insert(0, f"damaged at {place}: {end.message}{_ignored(end)}")
    elif not lost and not _is_closed(log, next_event):
        kind, parts = "killed", [UNCLOSED]
    return Ended(kind=kind, line="; ".join(parts) or "complete")


def _lost_words(lost: list[tuple[int, Frame]], frames: int) -> str:
    """Describe frames that a full disk has cost, once or several times."""
    count, (first, frame) = sum(each.lost for _, each in lost), lost[0]
    times = f", and later ones {len(lost) - 1} times" if len(lost) > 1 else ""
    where = "at its end" if codec.is_closing(frame) and first == frames - 1 else f"before frame {first}"
    return f"frames lost: {count:,} {where}, event {frame.first_event:,}{times}: they could not be written"


def _ignored(end: LogEnd) -> str:
    return f"; what is behind it is ignored ({end.ignored_bytes:,} bytes of this segment)" if end.ignored_bytes else ""


# ---- by the indexes ----------------------------------------------------------------------------------------------


def _last_indexed(log: Log) -> int | None:
    """The number of the event after the log's last one, if the indexes say that each segment is whole and follows the
    one before it; None if they do not, or are missing."""
    segments = Index(log).segments
    chain = next_event = None
    for segment in segments:
        header, directory = segment.log.header, segment.known
        if directory is None or directory.stopped or directory.end.kind != "complete":
            return None
        if chain is not None and (header.previous, header.first_event) != (chain, next_event):
            return None
        chain, next_event = directory.entries[-1].chain, directory.entries[-1].sequence
    return next_event if len(segments) == len(log.paths) else None


def _is_closed(log: Log, next_event: int) -> bool:
    """Whether the last record is the one with which an engine closes its log. A log lacks it if the engine decided
    nothing, if an earlier version wrote it, or if it is a part of a log that goes on."""
    last = open_log(log.paths[-1])
    following = last.paths[0].with_name(codec.segment_name(last.header.index + 1))
    if not log.header.closes or next_event == log.header.first_event or following.is_file():
        return True
    body = codec.encode_body(next_event, (), (), 0, last.header.token_width)
    size = codec.record_head.size + codec.digest_word.size + len(body)
    record = part_of(last.paths[0], max(0, size_of(last.paths[0]) - size))
    return record.endswith(body) and log_bytes.impl.record_end(record, 0) == size
