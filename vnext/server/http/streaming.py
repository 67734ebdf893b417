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


class Events:
    """One response of events. `send` writes a frame directly, without waking a task, and returns False when the client reads too
    slowly; the sender then waits for `room`. So a response holds at most the transport's limit and one frame."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self.path = request.path
        self._request = request
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self.response.enable_chunked_encoding()
        else:
            self.response.force_close()  # the response ends with the connection, even if the client asked for keep-alive
        self._first: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._writer: AbstractStreamWriter | None = None
        self._bytes_max = 0

    def send(self, *frames: bytes) -> bool:
        """Send frames; returns whether more can be sent at once. Nothing goes out before the first `room`."""
        transport = self._transport
        if transport is None:
            self._first += frames
            return False
        if transport.is_closing():
            return False
        transport.write(b"".join(map(_chunk_of, frames) if self._chunked else frames))
        return transport.get_write_buffer_size() <= self._bytes_max

    async def room(self) -> None:
        """Wait until more can be sent. Raises ClientGone."""
        try:
            if self._writer is None:
                await self._begin()
            elif self._transport.is_closing():
                raise ClientGone
            else:
                await self._writer.drain()
        except _TRANSPORT_ERRORS as error:
            raise ClientGone from error

    async def end(self, last: bytes) -> None:
        """Send the last frame. Raises ClientGone."""
        if self._writer is None:
            await self.room()
        try:
            await self.response.write_eof(last)
        except _TRANSPORT_ERRORS as error:
            raise ClientGone from error

    async def _begin(self) -> None:
        """Send the head, together with the first frame."""
        self._writer = await self.response.prepare(self._request)
        for frame in self._first:
            await self.response.write(frame)
        transport = self._request.transport
        if transport is None:
            raise ClientGone
        self._bytes_max = transport.get_write_buffer_limits()[1]
        self._transport = transport


def _chunk_of(frame: bytes) -> bytes:
    """A frame as an HTTP chunk. aiohttp would write it in a coroutine that never waits."""
    return b"%x\r\n%b\r\n" % (len(frame), frame)


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
