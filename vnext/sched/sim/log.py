"""A simulated run as a log: the bytes of one segment that `vnext-replay` opens. Pure: files belong to the caller."""

from __future__ import annotations

from collections.abc import Sequence

from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent
from vnext.state.log import chained, encode_body, encode_frame, first_header, open_segment
from vnext.state.reduce import reduce, start


def segment(events: Sequence[AnyEvent], code_version: str) -> bytes:
    """The events, EngineStarted first, each in a frame of its own. It ends with an event that the reducer refuses."""
    header = first_header(events[0], "full", code_version)
    data, chain = open_segment(header)
    parts, state = [data], start(events[0])
    for number, event in enumerate(events[1:], start=1):
        try:
            state, refused = reduce(state, event), False
        except IllegalEvent:
            refused = True
        body = encode_body(number, (event,), (), 0, header.token_width)
        chain = chained(chain, digest(state), body)
        parts.append(encode_frame(chain, body))
        if refused:
            break
    return b"".join(parts)
