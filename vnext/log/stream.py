"""Event streams: an engine's events for a reader elsewhere that folds them, as the bytes of a log.

A stream is one segment or several (docs/log-format.md), each beginning with a snapshot of the state and continued by the frames
that follow, with every token. Its reader checks each frame's chained digest against the state that it has folded, so it knows
whether it still has the engine's. Pure; sends nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from vnext.log import codec, log_bytes, snapshot as snapshots
from vnext.log.codec import SegmentHeader
from vnext.state.events import AnyEvent, EngineStarted
from vnext.state.state import State

Reader = TypeVar("Reader", bound=Hashable)
STREAM_INDEX = 1
"""A segment that begins with a snapshot is no log's first one."""


class EventStreams(Generic[Reader]):
    """The streams of one engine, one for each reader. Mutable; `readers` has the last chained digest of each one's stream."""

    def __init__(self, started: EngineStarted, code_version: str) -> None:
        self._header = msgspec.structs.replace(codec.first_header(started, "full", code_version), index=STREAM_INDEX)
        self.readers: dict[Reader, int] = {}

    def begin(self, reader: Reader, state: State) -> bytes:
        """The stream's first bytes; frames follow from this state on. A reader that has a stream gets another one."""
        head, self.readers[reader] = codec.open_segment(self._header_at(state))
        return head

    def end(self, reader: Reader) -> None:
        """This reader gets no more. Idempotent."""
        self.readers.pop(reader, None)

    def frames(self, events: Sequence[AnyEvent], state: State, state_digest: int) -> Iterator[tuple[Reader, bytes]]:
        """(reader, frame) for each of them. `events` are all those since the last call, `state` is the one behind them."""
        if not events or not self.readers:
            return
        frame = self._encoded(events, state.sequence - len(events))
        for reader, chain in tuple(self.readers.items()):
            own = bytearray(frame)
            self.readers[reader] = codec.seal_frame(own, chain, state_digest)
            yield reader, bytes(own)

    def _encoded(self, events: Sequence[AnyEvent], first_event: int) -> bytearray:
        """A frame that is complete but for its seal."""
        frame, width = bytearray(), self._header.token_width
        if (pair := codec.steady_pair(events)) is not None:
            committed, planned = pair
            if log_bytes.impl.put_steady(frame, first_event, committed.step, committed.tokens, planned.step, width):
                return frame
        codec.put_frame(frame, codec.encode_body(first_event, events, (), 0, width))
        return frame

    def _header_at(self, state: State) -> SegmentHeader:
        data = snapshots.encode(snapshots.snapshot(state), self._header.token_width)
        return msgspec.structs.replace(self._header, first_event=state.sequence, snapshot=data)
