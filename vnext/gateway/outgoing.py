"""Outgoing: a client's answer that has begun, in pieces as they come or as the complete events of a stream.

Cuts a stream of server-sent events where an event ends, however the socket cuts it. Follows what the client has been sent of a
stream with which another server may go on. The events of the first server pass as they are, and are looked at only when that
becomes necessary, or when they are many. Does no input or output: `vnext router` and Ray Serve's ingress write what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from aiohttp import web

from vnext.gateway.continuing import Diverged, Shown, split

CONTINUED_MAX = 3
"""Times that one stream goes on elsewhere: a request that ends each server which computes it must not end all."""
PAUSE_S = 0.5
"""Before a server that refuses to go on with a stream is asked again."""
WHOLE_BYTES_MAX = 2**20
"""A longer answer passes in pieces, and a server that fails within it cannot be replaced."""
EVENTS = "text/event-stream"
UNFOLDED_BYTES_MAX = 2**16
LOST = "The server ended within this answer, and no other can go on with it: send the request again."
ENDING = frozenset({"engine_dead", "engine_stalled", "aborted", "shutting_down"})
"""Codes of the errors by which a vnext server ends a stream that another could finish."""
END = b"\n\n"
_END_OF_OTHERS = b"\r\n\r\n"
HELD_BYTES_MAX = 2**22
"""Of one event; a longer one passes in pieces."""


class Failed(Exception):
    """A server has not answered, or not to the end. `answer`: what it said instead, to be passed on if no other says more."""

    def __init__(self, reason: str, sentence: str, answer: web.Response | None = None) -> None:
        super().__init__(sentence)
        self.reason, self.answer = reason, answer


class Outgoing:
    """See the module. `shown` is None for what is no stream of an API that this router knows. `fingerprint`: that of the servers
    which can go on with it, "" if none can. `continued`: how often one has. Mutable."""

    def __init__(self, shown: Shown | None, fingerprint: str) -> None:
        self.shown = shown
        self.fingerprint = "" if shown is None else fingerprint
        self.continued = 0
        self._whole = WholeEvents()
        self._unfolded: list[bytes] = []
        self._unfolded_bytes = 0

    @property
    def can_go_on(self) -> bool:
        """Whether another server may go on with it."""
        return bool(self.fingerprint) and self.continued <= CONTINUED_MAX

    def take(self, data: bytes) -> Iterator[bytes]:
        """Take in what has come; yields what passes on. Raises Failed."""
        if self.shown is None:
            yield data
            return
        events = self._whole.push(data)
        if self.fingerprint and (message := _ending(events)):
            raise Failed("error", f"it ends its stream: {message}")
        if self.fingerprint and self.continued:
            yield from self._lacking(events, self.shown)
            return
        yield events
        if not self.fingerprint:
            return
        self._unfolded.append(events)
        self._unfolded_bytes += len(events)
        if self._unfolded_bytes > UNFOLDED_BYTES_MAX:
            self._fold(self.shown)

    def end(self) -> bytes:
        """The server has answered to the end: what is left."""
        return self._whole.end()

    def move(self, failure: Failed) -> None:
        """Another server begins the stream again, if one can."""
        assert self.shown is not None
        if failure.reason == "diverged":
            self.fingerprint = ""
        self.continued += 1
        self._whole = WholeEvents()
        self._fold(self.shown)
        self.shown.begin_again()

    def lost(self) -> bytes:
        """The event that ends a stream with which no server can go on."""
        assert self.shown is not None
        return self.shown.error(LOST, "backend_lost")

    def _fold(self, shown: Shown) -> None:
        """Take in what the client has been sent."""
        events, self._unfolded, self._unfolded_bytes = b"".join(self._unfolded), [], 0
        for event in each_of(events) if self.fingerprint else ():
            shown.take(event)

    def _lacking(self, events: bytes, shown: Shown) -> Iterator[bytes]:
        """What the client lacks of the events of a server that goes on. Raises Failed."""
        try:
            for event in each_of(events):
                yield shown.take(event)
        except (Diverged, ValueError, RecursionError, LookupError, TypeError) as error:
            raise Failed("diverged", f"it does not repeat the stream: {error}") from error


def _ending(events: bytes) -> str:
    """The message of the event by which a vnext server ends a stream that it cannot finish, "" where there is none. No text of an
    answer contains the bytes that are looked for: its quotation marks are escaped."""
    for event in each_of(events) if b'"error":{' in events else ():
        try:
            found = msgspec.json.decode(split(event)[1])
        except (ValueError, RecursionError):
            continue
        error = (found.get("response") or found).get("error") if isinstance(found, dict) else None
        if isinstance(error, dict) and error.get("code") in ENDING:
            return str(error.get("message", ""))
    return ""


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
