"""Writes a log from a log: a folder of segments like the recorder's, with the chain recomputed from folded states.

Owns the files that redact, cut, merge and convert make. Everything in them was folded first, so their digests are right
by construction. Their header describes the engine as the first log's header does. Timestamps are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.log import codec, snapshot as snapshots
from vnext.log.codec import Frame, SegmentHeader, schema_digest
from vnext.log.snapshot import Snapshot, snapshot
from vnext.replay.reading.folding import Broken, FrameFolded, fold_items
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Carried, timestamps_path
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.events import AnyEvent, plan_of
from vnext.state.state import State

SNAPSHOT_SHARE = 4
"""A segment is at least this many times as long as its header."""


def new_folder(path: Path) -> Path:
    """Create an empty folder for a log. Raises UnusableLog if something is there already, or it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UnusableLog(f"{path} is not empty: name a new folder")
    except OSError as error:
        raise UnusableLog(f"{path} cannot be written ({reason(error)})") from error
    return path


def snapshot_of_log(state: State, privacy: str) -> Snapshot:
    """A folded state as its log's snapshots store it: without texts the chain of tokens starts anew."""
    found = snapshot(state)
    return msgspec.structs.replace(found, token_digest=0) if privacy == "shape" else found


class Writer:
    """A log being written. `decisions` chains the digests of all states that its frames led to: equal decisions give
    equal numbers, whatever the tokens."""

    def __init__(
        self,
        folder: Path,
        header: SegmentHeader,
        kept: Callable[[State], Snapshot],
        segment_bytes: int = codec.SEGMENT_SIZE_BYTES,
        made_of: Sequence[Log] = (),
    ) -> None:
        self._folder, self._kept, self._segment_bytes = new_folder(folder), kept, segment_bytes
        self._header = msgspec.structs.replace(
            header, digest_version=DIGEST_VERSION, schema=schema_digest(), frames_before=0
        )
        self._data, self._times = bytearray(), Carried(made_of)
        self._before: State | None = None
        self.chain = self.frames = self.decisions = self.bytes_written = 0
        self._open(self._header)

    def ready(self, before: State) -> None:
        """Prepare for a frame in this state: if the last segment is full, begin a new one with it."""
        self._before = before
        if len(self._data) >= self._full_at:
            self._flush()
            kept = snapshots.encode(self._kept(before), self._header.token_width)
            self._open(codec.next_header(self._header, self.chain, before.sequence, kept, self.frames))

    def write(self, body: bytes, after: State) -> None:
        state_digest = digest(after)
        self.chain = codec.chained(self.chain, state_digest, body)
        self.decisions = codec.chained(self.decisions, state_digest, b"")
        self._data += codec.encode_frame(self.chain, body)
        self.frames += 1
        if self._before is not None:
            self._times.frame(self._before, after)

    def close(self) -> None:
        self._flush()

    def _open(self, header: SegmentHeader) -> None:
        self._header = header
        data, self.chain = codec.open_segment(header)
        self._data = bytearray(data)
        self._full_at = max(self._segment_bytes, SNAPSHOT_SHARE * len(data))

    def _flush(self) -> None:
        path = self._folder / codec.segment_name(self._header.index)
        try:
            path.write_bytes(self._data)
            if times := self._times.taken():
                timestamps_path(path).write_bytes(times)
        except OSError as error:
            raise UnusableLog(f"{path} cannot be written ({reason(error)})") from error
        self.bytes_written += len(self._data)


# ---- frames of a log in another ----------------------------------------------------------------------------------


def require_whole(item: object) -> None:
    if isinstance(item, Broken):
        raise UnusableLog(f"the log can be folded up to event {item.number} only: {item.message}")


def with_events(header: SegmentHeader, frame: Frame, events: list[AnyEvent], width: int) -> bytes:
    """A frame with other events. The chain of real tokens is removed from its ranks' details.

    Rank reports in another version of digests are dropped, because they mean nothing in a newly written log.
    """
    if header.digest_version != DIGEST_VERSION:
        return codec.encode_body(frame.first_event, events, (), 0, width)
    details = tuple(msgspec.structs.replace(each, token_digest=0) for each in frame.details)
    return codec.encode_body(frame.first_event, events, frame.rank_digests, 0, width, details)


def same_body(header: SegmentHeader, frame: Frame) -> bytes:
    """A frame's body: its own bytes if they mean the same in a newly written log."""
    if header.digest_version == DIGEST_VERSION:
        return frame.body
    return with_events(header, frame, list(frame.events), header.token_width)


def copied(index: Index, out: Path, first_step: int, end_step: int | None) -> tuple[Writer, State, State]:
    """The frames from the one that plans `first_step` to the one before the plan of `end_step`. Returns the writer, still open, and
    the first and the last state."""
    log = index.log
    place = index.at_step(first_step)
    writer, first, before = None, place.state, place.state
    closes = log.header.closes and end_step is None
    if first_step == index.first.planned:
        place, first, before = index.at_event(0), index.first, index.first
        writer = writer_from((log,), out, before, closes)
    for item in fold_items(place.state, place.items):
        require_whole(item)
        if not isinstance(item, FrameFolded):
            continue
        planned = [plan.step for event in item.frame.events if (plan := plan_of(event)) is not None]
        if end_step is not None and planned and planned[-1] >= end_step:
            break
        if writer is None and planned and planned[-1] >= first_step:
            writer, first = writer_from((log,), out, before, closes), before
        if writer is not None:
            writer.ready(before)
            writer.write(same_body(log.header, item.frame), item.state)
        before = item.state
    assert writer is not None, "the log has the first step"
    return writer, first, before


def writer_from(parts: Sequence[Log], out: Path, state: State, closes: bool) -> Writer:
    """A log made of these parts that begins in this state: as the first part does, or with a snapshot. `closes`: it
    includes their end."""
    header, privacy = msgspec.structs.replace(parts[0].header, closes=closes), parts[0].header.privacy
    if state.sequence != header.first_event:
        kept = snapshots.encode(snapshot_of_log(state, privacy), header.token_width)
        header = msgspec.structs.replace(
            header, index=max(1, header.index), previous=0, first_event=state.sequence, snapshot=kept
        )
    return Writer(out, header, lambda each: snapshot_of_log(each, privacy), made_of=parts)
