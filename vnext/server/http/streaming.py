"""Streaming: chunks of an answer as server-sent events.

Owns the response's head, the frames and how a stream that has begun reports an error. Knows no chunk's content. Sends
nothing before the first chunk exists, so that a refusal still gets its proper HTTP status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import ClientError, HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from vnext.server.context.errors import DOMAIN_ERRORS, ClientGone, Failure, failure_of

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a buffering proxy would collect the tokens
}
FRAMES_MAX = 32  # unsent; a server that is behind reads many steps in one turn
_DONE = b"data: [DONE]\n\n"
_TRANSPORT_ERRORS = (OSError, ClientError)
_MARK = secrets.token_hex(16)  # no client can guess it

_encode = msgspec.json.Encoder().encode

log = logging.getLogger("vnext.server")


Answering = Callable[["Events"], Awaitable[None]]


def _fault_frame(failure: Failure) -> bytes:
    return frame_of(failure.body())


async def respond(
    request: web.Request,
    answering: Answering,
    done: bytes = _DONE,
    fault_frame: Callable[[Failure], bytes] = _fault_frame,
) -> web.StreamResponse:
    """Send the chunks of `answering`, then `done`. An error after the first chunk becomes the last frame instead."""
    events = Events(request)
    try:
        failure = await _failure(events, answering)
        await events.end(done if failure is None else fault_frame(failure))
    except ClientGone as error:  # leaving `answering` has aborted its requests
        log.debug("a client left %s before its stream had ended: %s", request.path, error.__cause__)
    return events.response


async def _failure(events: Events, answering: Answering) -> Failure | None:
    try:
        await answering(events)
    except ClientGone:
        raise
    except Exception as error:  # once a stream has begun, only a chunk can report it; before, the middleware does
        if not events.response.prepared:
            raise
        if not isinstance(error, DOMAIN_ERRORS):
            log.exception("a fault in the stream of %s", events.path)
        return failure_of(error)
    return None


class Turn:
    """The responses that have something to write at the end of this turn of the event loop."""

    def __init__(self) -> None:
        self._due: list[Events] = []

    def add(self, events: Events) -> None:
        """Have `events` write at the end of this turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._end)
        self._due.append(events)

    def _end(self) -> None:
        due, self._due = self._due, []
        for events in due:
            events.write()


TURN = web.AppKey("turn", Turn)


class _Response(web.StreamResponse):
    _send_headers_immediately = False  # they go with the first frames


class Events:
    """One response of events. `send` needs no task: what one turn of the event loop sends goes out in one write at its end. It
    returns False when the client reads too slowly; the sender then waits for `room`. So a response holds at most the transport's
    limit and FRAMES_MAX frames."""

    def __init__(self, request: web.Request) -> None:
        self.response = _Response(headers=_HEADERS)
        self.path = request.path
        self._request = request
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self.response.enable_chunked_encoding()
        else:
            self.response.force_close()  # the response ends with the connection, even if the client asked for keep-alive
        self._transport: asyncio.Transport | None = None
        self._writer: AbstractStreamWriter | None = None
        self._bytes_max = 0
        self._unsent: list[bytes] = []
        self._turn = request.app[TURN]

    def send(self, *frames: bytes) -> bool:
        """Send frames; returns whether more can be sent at once. Nothing goes out before the first `room`."""
        transport, unsent = self._transport, self._unsent
        if transport is not None and not unsent:
            self._turn.add(self)
        unsent += frames
        if transport is None or transport.is_closing():
            return False
        return len(unsent) < FRAMES_MAX and transport.get_write_buffer_size() <= self._bytes_max

    def write(self) -> None:
        """Write what this turn of the event loop has sent, in one system call. aiohttp would do it in a coroutine."""
        if (data := self._take()) and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _take(self) -> bytes:
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data

    async def room(self) -> None:
        """Wait until more can be sent. Raises ClientGone."""
        try:
            if self._writer is None:
                await self._begin()
            elif self._transport.is_closing():
                raise ClientGone
            else:
                self.write()
                await self._writer.drain()
        except _TRANSPORT_ERRORS as error:
            raise ClientGone from error

    async def end(self, last: bytes) -> None:
        """Send the last frame. Raises ClientGone."""
        if self._writer is None:
            await self.room()
        try:
            await self.response.write_eof(self._take() + last)
        except _TRANSPORT_ERRORS as error:
            raise ClientGone from error

    async def _begin(self) -> None:
        """Send the head, together with the first frames."""
        self._writer = await self.response.prepare(self._request)
        await self.response.write(self._take())
        transport = self._request.transport
        if transport is None:
            raise ClientGone
        self._bytes_max = transport.get_write_buffer_limits()[1]
        self._transport = transport


def frame_of(chunk: dict[str, Any]) -> bytes:
    """A chunk as an event."""
    return b"data: " + _encode(chunk) + b"\n\n"


def event_frame(event: dict[str, Any]) -> bytes:
    """An event under its own name, its `type`."""
    return b"event: " + event["type"].encode() + b"\n" + frame_of(event)


class TextFrame:
    """Events that differ in one text only: the bytes around it are made once. `chunk_of` makes the chunk for a text."""

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._head, self._tail = frame_of(chunk_of(_MARK)).split(_encode(_MARK))

    def of(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail
