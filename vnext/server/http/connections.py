"""Connections: bounds how long a connection may be idle, and how many may be open.

Owns the watch over a runner's connections. It closes a connection that sends no request, does not finish a request's head,
or reads nothing of its answer for a time. Over the bound, it closes the longest idle connections first, and those with a
request last. Knows no request: a middleware reports which connections have one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from vnext.server.context.admission import CLIENT_SHARE, share_of
from vnext.server.settings import ServerSettings

LOOK_INTERVAL_S = 0.25
CLOSED_AT_ONCE_MAX = 100  # closing one takes a twentieth of a millisecond
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


class _State:
    """One connection, busy within a `with` block. `since_s`: when it opened, ended its last request or last read a part of an
    answer. Mutable."""

    __slots__ = ("asked", "busy", "pending", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.asked = self.busy = False
        self.pending = 0

    def __enter__(self) -> None:
        self.asked = self.busy = True

    def __exit__(self, *_: object) -> None:
        self.busy, self.since_s = False, time.monotonic()


class Connections:
    """See the module."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._client_max = share_of(settings.connections_max, CLIENT_SHARE)
        self._states: dict[RequestHandler, _State] = {}

    def busy(self, connection: RequestHandler) -> _State:
        """A context manager: the connection has a request."""
        return self._states.setdefault(connection, _State(time.monotonic()))

    async def watch(self, connections: Callable[[], Iterable[RequestHandler]]) -> None:
        """Watch the connections forever."""
        while True:
            is_done = self.look(connections(), time.monotonic())
            await asyncio.sleep(LOOK_INTERVAL_S if is_done else LOOK_INTERVAL_S / 10)

    def look(self, connections: Iterable[RequestHandler], now_s: float) -> bool:
        """Close the connections that are due, or a part of them; returns whether none is left. `connections`: all open ones."""
        self._states = {each: self._states.get(each) or _State(now_s) for each in connections}
        late = {each for each, state in self._states.items() if now_s - state.since_s > self._allowed_s(each, state, now_s)}
        left = [each for each in self._states if each not in late]
        surplus = self._surplus(left)
        if surplus:
            log.warning("%d connections too many: at most %d may be open", len(surplus), self._settings.connections_max)
        gone = [*late, *surplus]
        for connection in gone[:CLOSED_AT_ONCE_MAX]:
            _end(connection)
        return len(gone) <= CLOSED_AT_ONCE_MAX

    def _allowed_s(self, connection: RequestHandler, state: _State, now_s: float) -> float:
        """How long a connection may stay in its state."""
        transport = connection.transport
        pending = 0 if transport is None else transport.get_write_buffer_size()
        if pending != state.pending:
            state.pending, state.since_s = pending, now_s
        if pending:
            return self._settings.write_timeout_s
        if state.busy:
            return float("inf")
        return self._settings.keepalive_timeout_s if state.asked else self._settings.head_timeout_s

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


class Runner(web.AppRunner):
    """Serves an application and watches over its connections."""

    def __init__(self, app: web.Application, connections: Connections, **options: Any) -> None:
        super().__init__(app, **options)
        self._connections = connections
        self._watch: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        await super().setup()
        self._watch = asyncio.create_task(self._connections.watch(lambda: self.server.connections))

    async def cleanup(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().cleanup()


def _end(connection: RequestHandler) -> None:
    """Close a connection at once: a normal close would wait for the unread rest of its answer."""
    transport = connection.transport
    connection.force_close()
    if transport is not None:
        transport.abort()


def _address(connection: RequestHandler) -> str:
    peer = connection.peername
    return peer[0] if isinstance(peer, tuple) else ""
