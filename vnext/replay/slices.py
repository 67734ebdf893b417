"""redact, cut, merge: logs made of logs. Every one of them folds what it writes, and proves it.

Owns what is kept: redact takes the texts away and no decision changes; cut keeps the frames of some steps behind the state
in which they begin; merge puts slices together again, byte by byte what they were cut from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from vnext.replay.folding import Broken, Folded, FrameFolded, first_state, fold, fold_items
from vnext.replay.index import Index
from vnext.replay.show import state_at
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.replay.writer import Writer, keyframe_of_log
from vnext.state import keyframe as keyframes, log as logs, log_pack, pseudonym
from vnext.state.digest import DIGEST_VERSION, digest, hexadecimal
from vnext.state.events import StepPlanned
from vnext.state.log import Frame, SegmentHeader
from vnext.state.shape import Shaper
from vnext.state.state import State


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A log that was made. `decisions` is one number for all states of its frames, in their order; `same`: folded again
    from what was written, it is the number of what it was made from."""

    same: bool
    log: str
    frames: int
    size_bytes: int
    first_step: int
    last_step: int
    decisions: str
    decisions_again: str


def decisions_of(log: Log) -> int:
    """The number of all states that a log's frames lead to (Writer.decisions)."""
    found = 0
    for item in fold(log):
        if isinstance(item, FrameFolded):
            found = logs.chained(found, digest(item.state), b"")
    return found


def _proved(writer: Writer, out: Path, first: State, last: State) -> Written:
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


def _whole(item: object) -> None:
    if isinstance(item, Broken):
        raise UnusableLog(f"the log can be folded up to event {item.number} only: {item.message}")


# ---- redact ------------------------------------------------------------------------------------------------------


def redact(log: Log, out: Path, segment_bytes: int = logs.SEGMENT_SIZE_BYTES) -> Written:
    """The same log without texts (shape.py), under a key that nobody keeps. UnusableLog for one that cannot be."""
    header = log.header
    if header.privacy == "shape":
        raise UnusableLog(f"{log.paths[0]} holds no text already: its privacy is shape")
    if header.index:
        raise UnusableLog(f"{log.paths[0]} begins in the middle: only a log from the engine's start can be redacted")
    shaper = Shaper(header.started, secrets.token_bytes(pseudonym.KEY_SIZE_BYTES))
    width = log_pack.width_bytes(logs.token_bound(header.started.config, "shape"))
    shaped_header = msgspec.structs.replace(header, privacy="shape", token_width=width)
    writer = Writer(out, shaped_header, shaper.keyframe, segment_bytes, made_of=(log,))
    first = state = first_state(log)
    shaped: list = []
    for item in fold(log):
        _whole(item)
        if isinstance(item, Folded):
            if not shaped:
                writer.ready(item.before)
            shaped.append(shaper.shape(item.before, item.event))
        elif isinstance(item, FrameFolded):
            writer.write(_body(header, item.frame, shaped, width), item.state)
            shaped, state = [], item.state
    return _proved(writer, out, first, state)


def _body(header: SegmentHeader, frame: Frame, events: list, width: int) -> bytes:
    """A frame with other events; of its ranks' details, the chain of real tokens goes too.

    What ranks told in another version of digests means nothing in a log that is written now: it goes.
    """
    if header.digest_version != DIGEST_VERSION:
        return logs.encode_body(frame.first_event, events, (), 0, width)
    details = tuple(msgspec.structs.replace(each, token_digest=0) for each in frame.details)
    return logs.encode_body(frame.first_event, events, frame.rank_digests, 0, width, details)


def _same_body(header: SegmentHeader, frame: Frame) -> bytes:
    """A frame as it is, its very bytes if they mean the same in a log that is written now."""
    if header.digest_version == DIGEST_VERSION:
        return frame.body
    return _body(header, frame, list(frame.events), header.token_width)


# ---- cut and merge -----------------------------------------------------------------------------------------------


def cut(index: Index, out: Path, first_step: int, end_step: int | None) -> Written:
    """The frames from the one that plans `first_step` on, up to before the one that plans `end_step`.

    UnusableLog if the log does not have the first step, or there is nothing between them.
    """
    log = index.log
    if end_step is not None and end_step <= first_step:
        raise UnusableLog(f"no step lies from {first_step} to before {end_step}: name the end last")
    state_at(index, first_step)
    place = index.at_step(first_step)
    writer, first, before = None, place.state, place.state
    if first_step == index.first.planned:
        place, first, before = index.at_event(0), index.first, index.first
        writer = _writer_from((log,), out, before)
    for item in fold_items(place.state, place.items):
        _whole(item)
        if not isinstance(item, FrameFolded):
            continue
        planned = [event.step for event in item.frame.events if isinstance(event, StepPlanned)]
        if end_step is not None and planned and planned[-1] >= end_step:
            break
        if writer is None and planned and planned[-1] >= first_step:
            writer, first = _writer_from((log,), out, before), before
        if writer is not None:
            writer.ready(before)
            writer.write(_same_body(log.header, item.frame), item.state)
        before = item.state
    assert writer is not None, "the log has the first step"
    return _proved(writer, out, first, before)


def _writer_from(parts: Sequence[Log], out: Path, state: State) -> Writer:
    """A log of these that begins in this state: as the first one does, or with a keyframe."""
    header, privacy = parts[0].header, parts[0].header.privacy
    if state.sequence != header.first_event:
        kept = keyframes.encode(keyframe_of_log(state, privacy), header.token_width)
        header = msgspec.structs.replace(
            header, index=max(1, header.index), previous=0, first_event=state.sequence, keyframe=kept
        )
    return Writer(out, header, lambda each: keyframe_of_log(each, privacy), made_of=parts)


def merge(parts: list[Log], out: Path) -> Written:
    """Slices of one run as one log again; where they overlap they must say the same. UnusableLog if they do not fit."""
    parts = sorted(parts, key=lambda log: log.header.first_event)
    first = state = first_state(parts[0])
    writer = _writer_from(parts, out, first)
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
    return _proved(writer, out, first, state)


def _frames(log: Log) -> Iterator[tuple[State, Frame | None, State]]:
    """Each frame between its states; then the last state, twice and without a frame."""
    before = first_state(log)
    for item in fold(log):
        _whole(item)
        if isinstance(item, FrameFolded):
            yield before, item.frame, item.state
            before = item.state
    yield before, None, before


def _require_same(log: Log, state: State, other: State) -> None:
    """Two parts that meet must meet in the same state."""
    if other.sequence > state.sequence:
        gap = f"begins at event {other.sequence}, and the parts before it end at event {state.sequence - 1}"
        raise UnusableLog(f"{log.paths[0]} {gap}")
    privacy = log.header.privacy
    if keyframe_of_log(state, privacy) != keyframe_of_log(other, privacy):
        raise UnusableLog(f"{log.paths[0]} is of another run: at event {state.sequence} the states differ")
