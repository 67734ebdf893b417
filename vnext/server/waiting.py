"""Waiting: connections that come while the model loads. They are kept unread, and the server takes them over when it is ready.

Meanwhile probes get their answer: /live is 200, and /health 503 with the part of the weights that is loaded. Behind TLS nothing is
answered before the server is there.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vnext.runtime.processes.run_dir import LOADED
from vnext.server.settings import ServerSettings
from vnext.server.tls import tls_context

BACKLOG = 1024
HEAD_BYTES = 4096
LOOK_AGAIN_S = 0.05  # at a head that is not there as a whole
LINGER_S = 1.0  # until an answered connection is closed, so that the client reads the answer first
_PROBE = re.compile(rb"(?:GET|HEAD) (\S*?)/(health|ping|live)(?:\?\S*)? HTTP/1\.[01]\r\n")


class WaitingRoom:
    """The connections of a listener until `hand_over`. Mutable."""

    def __init__(self, listener: socket.socket, settings: ServerSettings) -> None:
        """Listen. A server that takes another one's place keeps nobody waiting: the engine is there. Raises OSError where another
        program listens already."""
        self._loop, self._listener, self._settings = asyncio.get_running_loop(), listener, settings
        self._prefixes = {b"", settings.root_path.encode()}
        self._tls = tls_context(settings)
        self._kept: set[socket.socket] = set()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        if settings.number < settings.api_server_count:
            self._loop.add_reader(listener, self._accept)

    def hand_over(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Future[list[object]]:
        """Give all connections to protocols of a server; further ones are the server's own. The future ends once all have been
        taken, or have failed by themselves."""
        self._loop.remove_reader(self._listener)
        kept, self._kept = self._kept, set()
        for each in kept:
            self._loop.remove_reader(each)
        taken = (self._loop.connect_accepted_socket(protocol, each, ssl=self._tls) for each in kept)
        return asyncio.gather(*taken, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # nobody is there any more, or the process has no more descriptors
            return
        connection.setblocking(False)
        if len(self._kept) >= self._settings.connections_max:
            connection.close()
            return
        self._kept.add(connection)
        if self._tls is None:
            self._loop.add_reader(connection, self._look, connection)

    def _look(self, connection: socket.socket) -> None:
        """Answer a probe; leave everything else unread."""
        self._loop.remove_reader(connection)
        try:
            head = connection.recv(HEAD_BYTES, socket.MSG_PEEK)
        except OSError:
            head = b""
        if not head:
            self._drop(connection)
        elif b"\r\n\r\n" not in head and len(head) < HEAD_BYTES:
            self._loop.call_later(LOOK_AGAIN_S, self._watch_again, connection)
        elif (asked := _PROBE.match(head)) and asked[1] in self._prefixes:
            self._answer(connection, is_head=head.startswith(b"HEAD"), is_live=asked[2] == b"live")

    def _watch_again(self, connection: socket.socket) -> None:
        if connection in self._kept:
            self._loop.add_reader(connection, self._look, connection)

    def _answer(self, connection: socket.socket, is_head: bool, is_live: bool) -> None:
        status, content = ("200 OK", {"status": "ok"}) if is_live else ("503 Service Unavailable", self._health())
        body = json.dumps(content).encode()
        lines = (f"HTTP/1.1 {status}", "Content-Type: application/json; charset=utf-8", f"Content-Length: {len(body)}")
        head = "\r\n".join((*lines, "Retry-After: 1", "Connection: close", "", "")).encode()
        with suppress(OSError):  # the client has gone
            connection.recv(HEAD_BYTES)
            connection.send(head if is_head else head + body)
            connection.shutdown(socket.SHUT_WR)
        self._kept.discard(connection)
        self._loop.call_later(LINGER_S, connection.close)

    def _health(self) -> dict[str, object]:
        try:
            loaded = int((Path(self._settings.shared_dir) / LOADED).read_text()) / 100
        except (OSError, ValueError):  # no weight is there so far
            loaded = 0.0
        return {"status": "loading", "loaded": loaded}

    def _drop(self, connection: socket.socket) -> None:
        self._kept.discard(connection)
        connection.close()
