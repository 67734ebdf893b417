"""Events: a stream of server-sent events cut where an event ends, however the socket cuts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

END = b"\n\n"
_END_OF_OTHERS = b"\r\n\r\n"
HELD_BYTES_MAX = 2**22
"""Of one event; a longer one passes in pieces."""


class WholeEvents:
    """Passes on the events that are complete and keeps the beginning of the next one: a client that has half an event of one
    server could not go on with another's. Mutable."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        """Take in what has come; returns the complete events."""
        if not self._rest and data.endswith((END, _END_OF_OTHERS)):
            return data
        data = self._rest + data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in (END, _END_OF_OTHERS))
        cut = len(data) if len(data) - cut > HELD_BYTES_MAX else cut
        self._rest = data[cut:]
        return data[:cut]

    def end(self) -> bytes:
        """What is left when the stream has ended."""
        rest, self._rest = self._rest, b""
        return rest


def each_of(events: bytes) -> Iterator[bytes]:
    """The events among complete ones of a vnext server, each with its end."""
    return (event + END for event in events.split(END) if event)
