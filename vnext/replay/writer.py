"""Writing a log from a log: a folder of segments like the recorder's, its chain made anew from folded states.

Owns the files that redact, cut, merge and convert make. Everything in them was folded first, so their digests are right
by making; what they say of their engine is what the first log's header says. Stamps are carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vnext.replay.source import Log, UnusableLog
from vnext.replay.times import Carried, stamps_path
from vnext.state import keyframe as keyframes, log as logs
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.keyframe import Keyframe, keyframe
from vnext.state.log import SegmentHeader
from vnext.state.log_schema import schema_digest
from vnext.state.state import State

KEYFRAME_SHARE = 4
"""A segment is at least so many times as long as its header."""


def new_folder(path: Path) -> Path:
    """An empty folder for a log. UnusableLog if there is something already, or it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UnusableLog(f"{path} is not empty: name a new folder")
    except OSError as error:
        raise UnusableLog(f"{path} cannot be written: {error}") from error
    return path


def keyframe_of_log(state: State, privacy: str) -> Keyframe:
    """A folded state as its log's keyframes have it: the chain of tokens starts anew where there are no texts."""
    found = keyframe(state)
    return msgspec.structs.replace(found, token_digest=0) if privacy == "shape" else found


class Writer:
    """One log being written. `decisions` chains the digests of all states that its frames led to: equal decisions, equal
    numbers, whatever the tokens."""

    def __init__(
        self,
        folder: Path,
        header: SegmentHeader,
        kept: Callable[[State], Keyframe],
        segment_bytes: int = logs.SEGMENT_SIZE_BYTES,
        made_of: Sequence[Log] = (),
    ) -> None:
        self._folder, self._kept, self._segment_bytes = new_folder(folder), kept, segment_bytes
        self._header = msgspec.structs.replace(header, digest_version=DIGEST_VERSION, schema=schema_digest())
        self._data, self._times = bytearray(), Carried(made_of)
        self._before: State | None = None
        self.chain = self.frames = self.decisions = self.bytes_written = 0
        self._open(self._header)

    def ready(self, before: State) -> None:
        """The next frame comes in this state: begin a segment with it if the last one is full."""
        self._before = before
        if len(self._data) >= self._full_at:
            self._flush()
            kept = keyframes.encode(self._kept(before), self._header.token_width)
            self._open(logs.next_header(self._header, self.chain, before.sequence, kept))

    def write(self, body: bytes, after: State) -> None:
        """One frame: its body, and the state after it."""
        state_digest = digest(after)
        self.chain = logs.chained(self.chain, state_digest, body)
        self.decisions = logs.chained(self.decisions, state_digest, b"")
        self._data += logs.encode_frame(self.chain, body)
        self.frames += 1
        if self._before is not None:
            self._times.frame(self._before, after)

    def close(self) -> None:
        self._flush()

    def _open(self, header: SegmentHeader) -> None:
        self._header = header
        data, self.chain = logs.open_segment(header)
        self._data = bytearray(data)
        self._full_at = max(self._segment_bytes, KEYFRAME_SHARE * len(data))

    def _flush(self) -> None:
        path = self._folder / logs.segment_name(self._header.index)
        try:
            path.write_bytes(self._data)
            if times := self._times.taken():
                stamps_path(path).write_bytes(times)
        except OSError as error:
            raise UnusableLog(f"{path} cannot be written: {error}") from error
        self.bytes_written += len(self._data)
