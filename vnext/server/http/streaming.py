"""Streaming: chunks of an answer as server-sent events.

Owns the response's head, the frames, the signs of life in a long silence and how a stream that has begun reports an error. Knows
no chunk's content. Sends nothing before the first chunk exists or the first sign of life is due, so that a refusal still gets
its proper HTTP status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import ClientError, HttpVersion11, web
from aiohttp.http import SERVER_SOFTWARE

from vnext.server.context.errors import DOMAIN_ERRORS, ClientGone, Failure, failure_of
from vnext.server.context.identity import REQUEST_ID

_HEADERS = (
    "Cache-Control: no-cache\r\n"
    "X-Accel-Buffering: no\r\n"  # a buffering proxy would collect the tokens
    f"Server: {SERVER_SOFTWARE}\r\n"
)
FRAMES_MAX = 32  # unsent; a server that is behind reads many steps in one turn
DONE = b"data: [DONE]\n\n"
_TRANSPORT_ERRORS = (OSError, ClientError)
_NUMBERS = [b"%d\n" % number for number in range(2**12)]  # writing one takes as long as the rest of a frame
_MARK = secrets.token_hex(16)  # no client can guess it

_encode = msgspec.json.Encoder().encode
Entry = TypeVar("Entry")

log = logging.getLogger("vnext.server")


Answering = Callable[["Events"], Awaitable[None]]


class Form(NamedTuple):
    """How the frames of a stream lie in it. `ping`: a sign of life that no client takes for a frame, b"" where there is none."""

    content_type: str
    ping: bytes


SSE = Form("text/event-stream; charset=utf-8", b": keep-alive\n\n")
NDJSON = Form("application/x-ndjson", b"")


def _fault_frame(failure: Failure) -> bytes:
    return frame_of(failure.body())


async def respond(
    request: web.Request,
    answering: Answering,
    done: bytes | Callable[[], bytes] = DONE,
    fault_frame: Callable[[Failure], bytes] = _fault_frame,
    form: Form = SSE,
) -> web.StreamResponse:
    """Send the chunks of `answering`, then `done`, or what it returns. An error after the first chunk becomes the last frame
    instead. Pings are sent where nothing else has been for the interval of the settings, so that no proxy takes the stream for
    dead."""
    events = Events(request, form)
    await request.app.on_response_prepare.send(request, events.response)
    pings = request.app[TURN].pings
    pings.add(events)
    try:
        try:
            await answering(events)
        except ClientGone:
            raise
        except Exception as error:  # once a stream has begun, only a chunk can report it; before, the middleware does
            if not events.response.prepared:
                events.discard()
                raise
            if not isinstance(error, DOMAIN_ERRORS):
                log.exception("a fault in the stream of %s", events.path, extra={"request_id": events.request_id})
            last = fault_frame(failure_of(error))
        else:
            last = done if isinstance(done, bytes) else done()
        events.send_with_end(last)
        await events.room(is_last=True)
    except ClientGone as error:  # leaving `answering` has aborted its requests
        log.debug("a client left %s before its stream had ended: %s", request.path, error.__cause__)
    finally:
        pings.streams.discard(events)
    return events.response


class Pings:
    """Signs of life: a comment to each of `streams` that has been silent for `interval_s`, or for half of it; 0 for none. One timer
    serves all. Mutable."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.streams: set[Events] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, events: Events) -> None:
        """Look after a stream, while it is among `streams`."""
        self.streams.add(events)
        if self._timer is None and self._interval_s:
            self._begin()

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s / 2, self._look)

    def _look(self) -> None:
        self._timer = None
        for events in self.streams:
            events.looks += 1
            if events.looks > 1 and events.form.ping and events.is_quiet:
                events.send(events.form.ping)
        if self.streams:
            self._begin()


class Turn:
    """The responses that have something to write at the end of this turn of the event loop: `due`, of which the first has `end`
    called then."""

    def __init__(self, ping_interval_s: float = 0) -> None:
        self.pings = Pings(ping_interval_s)
        self.due: list[Events] = []

    def end(self) -> None:
        due, self.due = self.due, []
        for events in due:
            events.write()


TURN = web.AppKey("turn", Turn)


class _Response(web.StreamResponse):
    """The head of a response that `Events` writes itself, to which aiohttp has nothing to add. Each of aiohttp's own writes would
    take a coroutine and a system call."""

    prepared = False

    def __init__(self, request: web.Request, content_type: str) -> None:
        super().__init__()
        self._content_type = content_type
        self._version = request.version
        if self._version >= HttpVersion11:
            self.enable_chunked_encoding()
        # Without chunks the response ends with the connection, even if the client asked to keep it.
        self._keep_alive = self.chunked and request.keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing: the head has gone out with the first frames."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: the end has gone out with the last frames."""

    def head(self) -> bytes:
        """The response's head, which goes out now."""
        self.prepared = True
        own = "".join(map("%s: %s\r\n".__mod__, self.headers.items()))
        own += "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        own += "" if self._keep_alive else "Connection: close\r\n"
        major, minor = self._version
        own += f"Content-Type: {self._content_type}\r\n"
        return f"HTTP/{major}.{minor} 200 OK\r\n{_HEADERS}Date: {_date(int(time.time()))}\r\n{own}\r\n".encode()


class Events:
    """One response of events. `send` needs no task: what one turn of the event loop sends goes out in one write at its end. It
    returns False when the client reads too slowly; the sender then waits for `room`. So a response holds at most the transport's
    limit and FRAMES_MAX frames."""

    def __init__(self, request: web.Request, form: Form = SSE) -> None:
        """Raises ClientGone."""
        if request.transport is None:
            raise ClientGone
        self.form = form
        self.response = _Response(request, form.content_type)
        self.path = request.path
        self.request_id = request.get(REQUEST_ID, "")
        self._transport = request.transport
        self._writer = request.writer
        self._bytes_max = self._transport.get_write_buffer_limits()[1]
        self._unsent: list[bytes] = []
        self._is_ending = False
        self._turn = request.app[TURN]
        self._is_chunked = self.response.chunked  # a property, asked for at each write
        self.looks = 0
        """Of Pings, since bytes went out."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be sent or to be read by the client."""
        return not (self._unsent or self._is_ending or self._transport.is_closing() or self._transport.get_write_buffer_size())

    def send(self, *frames: bytes) -> bool:
        """Send frames at the end of this turn; returns whether more can be sent at once."""
        if not self._unsent:
            if not self._turn.due:
                asyncio.get_running_loop().call_soon(self._turn.end)
            self._turn.due.append(self)
        self._unsent += frames
        if self._transport.is_closing():
            return False
        return len(self._unsent) < FRAMES_MAX and self._transport.get_write_buffer_size() <= self._bytes_max

    def send_with_end(self, *frames: bytes) -> bool:
        """Send frames, and what this turn has sent before, together with the response's end, which follows at once."""
        self._unsent += frames
        self._is_ending = True
        return True

    def discard(self) -> None:
        """Send nothing of what was sent in this turn."""
        self._unsent.clear()

    def write(self, is_last: bool = False) -> None:
        """Write what this turn of the event loop has sent, in one system call."""
        if self._is_ending and not is_last:
            return
        data, is_chunked = b"".join(self._unsent), self._is_chunked
        self._unsent.clear()
        if not (data or is_last) or self._transport.is_closing():
            return
        if data and is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.looks = 0
        if not self.response.prepared:
            data = self.response.head() + data
        self._transport.write(data + b"0\r\n\r\n" if is_last and is_chunked else data)

    async def room(self, is_last: bool = False) -> None:
        """Wait until more can be sent. Raises ClientGone."""
        if self._transport.is_closing():
            raise ClientGone
        self.write(is_last)
        try:
            await self._writer.drain()
        except _TRANSPORT_ERRORS as error:
            raise ClientGone from error


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def frame_of(chunk: Mapping[str, object]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def line_frame(event: Mapping[str, object]) -> bytes:
    return _encode(event) + b"\n"


def event_frame(event: dict[str, Any]) -> bytes:
    """An event under its own name, its `type`."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\n" + frame_of(event)


class TextFrame:
    """Events that differ in one text only: the bytes around it are made once. `chunk_of` makes the chunk for a text."""

    def __init__(self, chunk_of: Callable[[str], dict[str, Any]], request: bytes = b"") -> None:
        """`request`: how the events' ids begin."""
        self._head, self._tail = frame_of(chunk_of(_MARK)).split(_encode(_MARK))
        self._id = b"id: " + request

    def of(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail

    def numbered(self, text: str, number: int) -> bytes:
        """With the id that ends with a number."""
        line = _NUMBERS[number] if number < len(_NUMBERS) else b"%d\n" % number
        return b"".join((self._id, line, self._head, _encode(text), self._tail))


async def unhurried(entries: Iterable[Entry], count: int) -> AsyncIterator[Entry]:
    """The entries, with a turn for others after each `count` of them: for work of which one takes microseconds."""
    for place, entry in enumerate(entries, 1):
        yield entry
        if not place % count:
            await asyncio.sleep(0)
