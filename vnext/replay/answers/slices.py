"""cut, merge, redact: make logs from logs. Each folds what it writes and proves that it is right.

Owns what is kept. cut keeps the frames of some steps, after the state in which they begin. merge joins slices again,
byte for byte equal to what they were cut from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vnext.log import codec, pseudonyms, snapshot as snapshots
from vnext.log.codec import Frame
from vnext.log.redaction import Redactor
from vnext.replay.reading.folding import Folded, FrameFolded, first_state, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.writer import Writer, copied, require_whole, same_body, snapshot_of_log, with_events, writer_from
from vnext.state.block_hash import root_hash
from vnext.state.digest import digest, hexadecimal
from vnext.state.events import AnyEvent, RequestArrived, generated_by
from vnext.state.preempt import row_tokens
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


# ---- cut and merge -----------------------------------------------------------------------------------------------


def cut(index: Index, out: Path, first_step: int, end_step: int | None) -> Written:
    """The frames from the one that plans `first_step` to the one before the plan of `end_step`.

    Raises UnusableLog if the log does not have the first step, or there is nothing between the two.
    """
    if end_step is not None and end_step <= first_step:
        raise UnusableLog(f"no step lies from {first_step} to before {end_step}: name the end last")
    state_at(index, first_step)
    writer, first, last = copied(index, out, first_step, end_step)
    return proved(writer, out, first, last)


def merge(parts: list[Log], out: Path) -> Written:
    """Join slices of one run into one log; overlapping parts must agree. Raises UnusableLog if they do not fit."""
    parts = sorted(parts, key=lambda log: log.header.first_event)
    first = state = first_state(parts[0])
    writer = writer_from(parts, out, first, parts[-1].header.closes)
    for place, log in enumerate(parts):
        joined = not place
        for before, frame, after in _frames(log):
            if not joined and before.sequence >= state.sequence:
                _require_same(log, state, before)
                joined = True
            if frame is not None and before.sequence == state.sequence:
                writer.ready(state)
                writer.write(same_body(log.header, frame), after)
                state = after
        if not joined:  # all of it lies within the parts before it
            _require_same(log, _state_at(parts[:place], before), before)
    return proved(writer, out, first, state)


def _state_at(parts: list[Log], wanted: State) -> State:
    """The state of these parts behind as many events, or the first state if no frame of theirs ends there."""
    states = (before for log in parts for before, _, _ in _frames(log))
    return next((state for state in states if state.sequence == wanted.sequence), first_state(parts[0]))


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
        raise UnusableLog(f"{log.paths[0]} is of another run: at event {other.sequence} the states differ")


# ---- redact ------------------------------------------------------------------------------------------------------
# log/redaction.py decides what is kept of an event. If a log has lost its first segments, redaction starts at its snapshot. The
# texts in that snapshot's kept blocks are known only from requests that live there or arrive later, so those are read first.


def redact(log: Log, out: Path, segment_bytes: int = codec.SEGMENT_SIZE_BYTES) -> Written:
    """The same log without texts (log/redaction.py), under a key that is then discarded. Raises UnusableLog if it
    cannot be redacted."""
    header = log.header
    if header.privacy == "shape":
        raise UnusableLog(f"{log.paths[0]} holds no text already: its privacy is shape")
    redactor = Redactor(header.started, secrets.token_bytes(pseudonyms.KEY_SIZE_BYTES))
    width = codec.width_bytes(codec.token_bound(header.started.config, "shape"))
    shaped_header = msgspec.structs.replace(header, privacy="shape", token_width=width)
    first = state = first_state(log)
    if header.index:
        redactor.resume(first, histories(log))
        kept = snapshots.encode(redactor.snapshot(first), width)
        shaped_header = msgspec.structs.replace(shaped_header, previous=0, snapshot=kept)
    writer = Writer(out, shaped_header, redactor.snapshot, segment_bytes, made_of=(log,))
    shaped: list[AnyEvent] = []
    for item in fold(log):
        require_whole(item)
        if isinstance(item, Folded):
            if not shaped:
                writer.ready(item.before)
            shaped.append(redactor.redact(item.before, item.event))
        elif isinstance(item, FrameFolded):
            writer.write(with_events(header, item.frame, shaped, width), item.state)
            shaped, state = [], item.state
    return proved(writer, out, first, state)


def histories(log: Log) -> Iterator[tuple[bytes, str, bytes]]:
    """Root key, adapter and known tokens (int32 bytes) of all requests of a log: at arrival, and each time a request leaves its
    row. Raises UnusableLog if the log cannot be folded to its end."""
    last = first_state(log)
    yield from _queued(last)
    for item in fold(log):
        require_whole(item)
        if not isinstance(item, Folded):
            continue
        if isinstance(item.event, RequestArrived):
            arrival, adapter = item.event, item.event.sampling.adapter
            tokens = arrival.prompt + generated_by(arrival)
            yield root_hash(arrival.cache_salt, last.config.block_size, adapter), adapter, tokens
        yield from _running(item.before, _ids(item.before) - _ids(item.after))
        last = item.after
    yield from _running(last, _ids(last))


def _ids(state: State) -> set[int]:
    return set(state.rows.id.tolist())


def _queued(state: State) -> Iterator[tuple[bytes, str, bytes]]:
    for entry in state.waiting:
        request = state.requests[entry.id]
        yield request.root, request.sampling.adapter, entry.tokens


def _running(state: State, wanted: set[int]) -> Iterator[tuple[bytes, str, bytes]]:
    for row, id_ in enumerate(state.rows.id.tolist() if wanted else ()):
        if id_ in wanted:
            request = state.requests[id_]
            yield request.root, request.sampling.adapter, row_tokens(state, row).tobytes()
