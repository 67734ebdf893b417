"""cut, merge: make logs from logs. Both fold what they write and prove that it is right.

Owns what is kept. cut keeps the frames of some steps, after the state in which they begin. merge joins slices again,
byte for byte equal to what they were cut from. redact (redacting.py) uses the same proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from vnext.log import codec, snapshot as snapshots
from vnext.log.codec import Frame, SegmentHeader
from vnext.replay.reading.folding import Broken, FrameFolded, first_state, fold, fold_items
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.state.digest import DIGEST_VERSION, digest, hexadecimal
from vnext.state.events import plan_of
from vnext.state.state import State


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A log that was made. `decisions` is one number for all states of its frames, in order. `same`: folding the
    written log gave the number of its source."""

    same: bool
    log: str
    frames: int
    size_bytes: int
    first_step: int
    last_step: int
    decisions: str
    decisions_again: str


def decisions_of(log: Log) -> int:
    """One number for all states that a log's frames lead to (Writer.decisions)."""
    found = 0
    for item in fold(log):
        if isinstance(item, FrameFolded):
            found = codec.chained(found, digest(item.state), b"")
    return found


def proved(writer: Writer, out: Path, first: State, last: State) -> Written:
    writer.close()
    again = decisions_of(open_log(out))
    return Written(
        same=again == writer.decisions,
        log=str(out),
        frames=writer.frames,
        size_bytes=writer.bytes_written,
        first_step=first.planned,
        last_step=last.planned - 1,
        decisions=hexadecimal(writer.decisions),
        decisions_again=hexadecimal(again),
    )


def require_whole(item: object) -> None:
    if isinstance(item, Broken):
        raise UnusableLog(f"the log can be folded up to event {item.number} only: {item.message}")


def with_events(header: SegmentHeader, frame: Frame, events: list, width: int) -> bytes:
    """A frame with other events. The chain of real tokens is removed from its ranks' details.

    Rank reports in another version of digests are dropped, because they mean nothing in a newly written log.
    """
    if header.digest_version != DIGEST_VERSION:
        return codec.encode_body(frame.first_event, events, (), 0, width)
    details = tuple(msgspec.structs.replace(each, token_digest=0) for each in frame.details)
    return codec.encode_body(frame.first_event, events, frame.rank_digests, 0, width, details)


def _same_body(header: SegmentHeader, frame: Frame) -> bytes:
    """A frame's body: its own bytes if they mean the same in a newly written log."""
    if header.digest_version == DIGEST_VERSION:
        return frame.body
    return with_events(header, frame, list(frame.events), header.token_width)


# ---- cut and merge -----------------------------------------------------------------------------------------------


def cut(index: Index, out: Path, first_step: int, end_step: int | None) -> Written:
    """The frames from the one that plans `first_step` to the one before the plan of `end_step`.

    Raises UnusableLog if the log does not have the first step, or there is nothing between the two.
    """
    log = index.log
    if end_step is not None and end_step <= first_step:
        raise UnusableLog(f"no step lies from {first_step} to before {end_step}: name the end last")
    state_at(index, first_step)
    place = index.at_step(first_step)
    writer, first, before = None, place.state, place.state
    closes = log.header.closes and end_step is None
    if first_step == index.first.planned:
        place, first, before = index.at_event(0), index.first, index.first
        writer = _writer_from((log,), out, before, closes)
    for item in fold_items(place.state, place.items):
        require_whole(item)
        if not isinstance(item, FrameFolded):
            continue
        planned = [plan.step for event in item.frame.events if (plan := plan_of(event)) is not None]
        if end_step is not None and planned and planned[-1] >= end_step:
            break
        if writer is None and planned and planned[-1] >= first_step:
            writer, first = _writer_from((log,), out, before, closes), before
        if writer is not None:
            writer.ready(before)
            writer.write(_same_body(log.header, item.frame), item.state)
        before = item.state
    assert writer is not None, "the log has the first step"
    return proved(writer, out, first, before)


def _writer_from(parts: Sequence[Log], out: Path, state: State, closes: bool) -> Writer:
    """A log made of these parts that begins in this state: as the first part does, or with a snapshot. `closes`: it
    includes their end."""
    header, privacy = msgspec.structs.replace(parts[0].header, closes=closes), parts[0].header.privacy
    if state.sequence != header.first_event:
        kept = snapshots.encode(snapshot_of_log(state, privacy), header.token_width)
        header = msgspec.structs.replace(
            header, index=max(1, header.index), previous=0, first_event=state.sequence, snapshot=kept
        )
    return Writer(out, header, lambda each: snapshot_of_log(each, privacy), made_of=parts)


def merge(parts: list[Log], out: Path) -> Written:
    """Join slices of one run into one log; overlapping parts must agree. Raises UnusableLog if they do not fit."""
    parts = sorted(parts, key=lambda log: log.header.first_event)
    first = state = first_state(parts[0])
    writer = _writer_from(parts, out, first, parts[-1].header.closes)
    for log in parts:
        joined = log is parts[0]
        for before, frame, after in _frames(log):
            if not joined and before.sequence >= state.sequence:
                _require_same(log, state, before)
                joined = True
            if frame is not None and before.sequence == state.sequence:
                writer.ready(state)
                writer.write(_same_body(log.header, frame), after)
                state = after
    return proved(writer, out, first, state)


def _frames(log: Log) -> Iterator[tuple[State, Frame | None, State]]:
    """Each frame with the states before and after it; then the last state twice, without a frame."""
    before = first_state(log)
    for item in fold(log):
        require_whole(item)
        if isinstance(item, FrameFolded):
            yield before, item.frame, item.state
            before = item.state
    yield before, None, before


def _require_same(log: Log, state: State, other: State) -> None:
    """Require that two parts that meet have the same state there."""
    if other.sequence > state.sequence:
        gap = f"begins at event {other.sequence}, and the parts before it end at event {state.sequence - 1}"
        raise UnusableLog(f"{log.paths[0]} {gap}")
    privacy = log.header.privacy
    if snapshot_of_log(state, privacy) != snapshot_of_log(other, privacy):
        raise UnusableLog(f"{log.paths[0]} is of another run: at event {state.sequence} the states differ")
