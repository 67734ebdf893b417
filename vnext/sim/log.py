"""A simulated run as a log: the bytes of one segment, as the engine writes them. Pure: files belong to the caller."""

from __future__ import annotations

from collections.abc import Sequence

from vnext.log import reading as log_read
from vnext.log.codec import EndKind, Frame, LogEnd, SegmentStart, chained, encode_body, encode_frame, first_header, open_segment
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, EngineStarted, first_of
from vnext.state.reduce import reduce, start
from vnext.state.state import State


class Tape:
    """A segment that grows by frames. Mutable; `width` bytes a token; `ends` says behind how many bytes how many events
    are whole."""

    def __init__(self, started: EngineStarted, code_version: str) -> None:
        header = first_header(started, "full", code_version)
        data, self._chain = open_segment(header)
        self.width, self._parts = header.token_width, [data]
        self.ends = [(len(data), 1)]

    def write(self, events: Sequence[AnyEvent], after: State) -> None:
        """One frame: an iteration of the engine, and the digest of the state that it left."""
        size, count = self.ends[-1]
        body = encode_body(count, events, (), 0, self.width)
        self._chain = chained(self._chain, digest(after), body)
        self._parts.append(encode_frame(self._chain, body))
        self.ends.append((size + len(self._parts[-1]), count + len(events)))

    def data(self) -> bytes:
        """The segment so far."""
        return b"".join(self._parts)


def events_of(data: bytes) -> tuple[list[AnyEvent], EndKind]:
    """The events of a segment, EngineStarted first, and how it ends."""
    events: list[AnyEvent] = []
    for item in log_read.read([data]):
        if isinstance(item, LogEnd):
            return events, item.kind
        if isinstance(item, Frame):
            events += item.events
        elif isinstance(item, SegmentStart):
            events.append(item.header.started)
    raise AssertionError("a log has an end")


def segment(events: Sequence[AnyEvent], code_version: str) -> bytes:
    """The events, EngineStarted first, each in a frame of its own. It ends with an event that the reducer refuses."""
    started = first_of(events)
    tape, state = Tape(started, code_version), start(started)
    for event in events[1:]:
        try:
            state, refused = reduce(state, event), False
        except IllegalEvent:
            refused = True
        tape.write((event,), state)
        if refused:
            break
    return tape.data()
