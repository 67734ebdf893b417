"""redact: writes the same log without its texts; every decision stays the same.

Owns the walk; log/redaction.py decides what is kept of an event. If a log has lost its first segments, redaction starts
at its snapshot. The texts in that snapshot's kept blocks are known only from requests that live there or arrive later,
so those are read first.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vnext.log import codec, pseudonyms, snapshot as snapshots
from vnext.log.redaction import Redactor
from vnext.replay.answers.slices import Written, proved
from vnext.replay.reading.folding import Folded, FrameFolded, first_state, fold
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.writer import Writer, require_whole, with_events
from vnext.state.block_hash import root_hash
from vnext.state.events import AnyEvent, RequestArrived, generated_by
from vnext.state.preempt import row_tokens
from vnext.state.state import State


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
