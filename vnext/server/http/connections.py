"""Connections: bounds how long a connection may be idle, and how many may be open.

Owns the watch over a runner's connections. It closes a connection that sends no request, does not finish a request's head,
or hardly reads its answer for a time: its stream has paused meanwhile. Over the bound, it closes the longest idle connections
first, and those with a request last. A middleware reports which connections have a request, and its id.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from asyncio import selector_events, sslproto
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from vnext.server.context.admission import CLIENT_SHARE, share_of
from vnext.server.context.errors import Failure
from vnext.server.settings import ServerSettings

LOOK_INTERVAL_S = 0.25
CLOSED_AT_ONCE_MAX = 100  # closing one takes a twentieth of a millisecond
READ_BYTES = 2**14
PROGRESS_BYTES = 4096  # that a slow reader must read, or all that waits for it, to get more time
EXPECTED = "100-continue"
ADDRESS_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX = 8_191, 8_190, 128  # the first two differ, to tell which one an error is about
CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, OSError)
FILES_BESIDE = 256  # other files of this process: sockets to the engine, the log's parts, libraries

log = logging.getLogger("vnext.server")


def room_for(connections_max: int) -> int:
    """`connections_max`, or fewer where the system allows fewer files; raises the process's limit first. A failing accept
    would stop all connections."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections_max + FILES_BESIDE
    if now != resource.RLIM_INFINITY and now < needed:
        now = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))
    return connections_max if now == resource.RLIM_INFINITY else max(1, min(connections_max, now - FILES_BESIDE))


class State:
    """One connection. `since_s`: when it opened, ended its last request or last read a part of an answer. `pending`: bytes that
    waited for the client then. Mutable."""

    __slots__ = ("asked", "busy", "pending", "request_id", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.asked = self.busy = False
        self.pending = 0
        self.request_id = ""

    def rest(self) -> None:
        """The connection's request has been answered."""
        self.busy, self.since_s = False, time.monotonic()


class Connections:
    """See the module. `closed` gets why a connection was closed: slow_reader, slow_head, idle, or too_many."""

    def __init__(self, settings: ServerSettings, closed: Callable[[str], None] = lambda reason: None) -> None:
        self._settings, self._closed = settings, closed
        self._client_max = share_of(settings.connections_max, CLIENT_SHARE)
        self._states: dict[RequestHandler, State] = {}

    def busy(self, connection: RequestHandler, request_id: str = "") -> State:
        """The connection has a request, until `rest`."""
        if (state := self._states.get(connection)) is None:
            state = self._states[connection] = State(time.monotonic())
        state.asked = state.busy = True
        state.request_id = request_id
        return state

    async def watch(self, connections: Callable[[], Iterable[RequestHandler]]) -> None:
        """Watch the connections forever."""
        while True:
            is_done = self.look(connections(), time.monotonic())
            await asyncio.sleep(LOOK_INTERVAL_S if is_done else LOOK_INTERVAL_S / 10)

    def look(self, connections: Iterable[RequestHandler], now_s: float) -> bool:
        """Close the connections that are due, or a part of them; returns whether none is left. `connections`: all open ones."""
        self._states = {each: self._states.get(each) or State(now_s) for each in connections}
        late = {}
        for each, state in self._states.items():
            limit_s, reason = self._limit(each, state, now_s)
            if now_s - state.since_s > limit_s:
                late[each] = reason
        left = [each for each in self._states if each not in late]
        surplus = self._surplus(left)
        if surplus:
            log.warning("%d connections too many: at most %d may be open", len(surplus), self._settings.connections_max)
        gone = late | dict.fromkeys(surplus, "too_many")
        for connection, reason in [*gone.items()][:CLOSED_AT_ONCE_MAX]:
            self._end(connection, reason)
        return len(gone) <= CLOSED_AT_ONCE_MAX

    def _end(self, connection: RequestHandler, reason: str) -> None:
        state = self._states[connection]
        self._closed(reason)
        if reason == "slow_reader":
            words = "closed the connection of %s: its client read less than %d of the %d bytes that wait, for %g s"
            figures = PROGRESS_BYTES, state.pending, self._settings.write_timeout_s
            log.warning(words, state.request_id, *figures, extra={"request_id": state.request_id})
        _abort(connection)

    def _limit(self, connection: RequestHandler, state: State, now_s: float) -> tuple[float, str]:
        """How long a connection may stay in its state, and why not longer. What waits grows only while the stream goes on: a
        client that takes a few bytes now and then gets no more time."""
        transport = connection.transport
        pending = 0 if transport is None else transport.get_write_buffer_size()
        if pending > state.pending or pending <= state.pending - PROGRESS_BYTES or (state.pending and not pending):
            state.pending, state.since_s = pending, now_s
        if pending:
            return self._settings.write_timeout_s, "slow_reader"
        if state.busy:
            return float("inf"), ""
        return (self._settings.keepalive_timeout_s, "idle") if state.asked else (self._settings.head_timeout_s, "slow_head")

    def _surplus(self, connections: list[RequestHandler]) -> list[RequestHandler]:
        """The connections over the bounds: first those longest without a request, then the newest with one."""

        def place(connection: RequestHandler) -> tuple[bool, float]:
            state = self._states[connection]
            return state.busy, -state.since_s if state.busy else state.since_s

        count, clients = len(connections), Counter(map(_address, connections))
        if count <= self._client_max:
            return []
        surplus = []
        for connection in sorted(connections, key=place):
            address = _address(connection)
            if count > self._settings.connections_max or clients[address] > self._client_max:
                surplus.append(connection)
                count, clients[address] = count - 1, clients[address] - 1
        return surplus


CONNECTIONS = web.AppKey("connections", Connections)


def expecting_little(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """What makes requests, of which each loses an Expect that this server does not know: aiohttp would answer it in words of its
    own, before any check, and with a fault of the server where its bytes are no text."""

    def made(message: RawRequestMessage, *rest: object) -> web.BaseRequest:
        if message.headers.get("Expect", EXPECTED).lower() != EXPECTED:
            kept = message.headers.copy()
            del kept["Expect"]
            message = message._replace(headers=type(message.headers)(kept))
        return make(message, *rest)

    return made


def unread(error: BaseException | None) -> Failure:
    """What a client sees of a head, or a frame of a body, that the parser refuses."""
    if isinstance(error, LineTooLong):
        if error.args[1] == ADDRESS_BYTES_MAX:
            return Failure(414, "The request's address is longer than 8 KiB: shorten it.", code="address_too_long")
        return Failure(431, "A header of the request is longer than 8 KiB: shorten it.", code="headers_too_large")
    words = str(getattr(error, "message", "")).partition("\n")[0].rstrip(".:") or "its end is missing"
    if words.startswith("Too many"):
        return Failure(431, f"The request has more than {HEADERS_MAX} headers: send fewer.", code="headers_too_large")
    return Failure(400, f"The request is no valid HTTP/1.1: {words[:1].lower()}{words[1:]}.", code="bad_request")


class _Protocol(RequestHandler):
    """A connection whose errors below the application are error objects, as those of the views."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        answer = super().handle_error(request, status, exc, message)  # logs it
        if status == 400:
            answer = unread(exc).response()
            answer.force_close()
        return answer


class _Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Serves an application and watches over its connections. Cancels a view when its client disconnects, streaming or not; the
    view then ends its work. `bodies` decompresses, within a bound."""

    def __init__(self, app: web.Application, connections: Connections, **options: Any) -> None:
        options |= {"max_line_size": ADDRESS_BYTES_MAX, "max_field_size": HEADER_BYTES_MAX, "max_headers": HEADERS_MAX}
        options |= {"handler_cancellation": True, "access_log": None, "auto_decompress": False, "logger": protocol_log()}
        super().__init__(app, **options)
        self._connections = connections
        self._watch: asyncio.Task[None] | None = None

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        factory, cancels = expecting_little(made.request_factory), made.handler_cancellation
        return _Server(made.request_handler, request_factory=factory, handler_cancellation=cancels, loop=made._loop, **made._kwargs)

    async def setup(self) -> None:
        await super().setup()
        server = self.server
        assert server is not None, "the runner has been set up"
        read_little()
        self._watch = asyncio.create_task(self._connections.watch(lambda: server.connections))

    async def cleanup(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().cleanup()


def read_little() -> None:
    """Have asyncio read READ_BYTES of a connection in a turn. All that is read is parsed at once, and in 256 KB, asyncio's own
    number, 40,000 chunks of a byte or as many headers behind a body have room, which take 100 ms."""
    for transport in (selector_events._SelectorTransport, sslproto.SSLProtocol):  # type: ignore[attr-defined]
        transport.max_size = READ_BYTES


def _abort(connection: RequestHandler) -> None:
    """Close a connection at once: a normal close would wait for the unread rest of its answer."""
    transport = connection.transport
    connection.force_close()
    if transport is not None:
        transport.abort()


def _address(connection: RequestHandler) -> str:
    peer = connection.peername
    return peer[0] if isinstance(peer, tuple) else ""


def protocol_log() -> logging.Logger:
    """The logger of aiohttp for everything below the views. A client's faults are not logged as errors of this server."""
    logger = logging.getLogger("vnext.server.http")
    logger.addFilter(_own_faults)
    return logger


def _own_faults(record: logging.LogRecord) -> bool:
    """Whether to log the record. A client's faults are logged at the level debug at most."""
    fault = record.exc_info[1] if record.exc_info else None
    if not isinstance(fault, CLIENT_FAULTS):
        return True
    record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
    record.msg, record.args = f"{record.getMessage()}: {' '.join(str(fault).split())[:200]!r}", ()
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
