"""Run: the API process. Binds the port, connects to the engine core, serves, and drains on SIGTERM.

Owns the process's signals, its log level and its exit code. On the first SIGTERM it refuses new requests and lets the live
ones finish within `drain_s`; on the second it aborts them at once. Both end with exit code 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec
from aiohttp import web

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.runtime.client.engines import AnyEngineClient, connect_engines
from vnext.runtime.client.output_stream import EngineDead, EngineNotStarted
from vnext.runtime.processes.run_dir import LOADED
from vnext.runtime.protocol import log_lines
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server import load_line
from vnext.server.batches.service import BATCHES, Batches
from vnext.server.console import curl_line, write_error, write_line
from vnext.server.context.api_keys import ApiKeys, KeysUnusable
from vnext.server.context.errors import StoreUnusable
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, follow_keys, template_of
from vnext.server.context.text_work import settle
from vnext.server.context.traces import TracesUnusable, require_traces
from vnext.server.http.background import BACKGROUND, Background, close_background
from vnext.server.http.connections import CONNECTIONS, Connections, Runner, room_for
from vnext.server.http.middleware import FRONT, OPEN, OPERATORS, Front, add_headers, observe, translate
from vnext.server.http.siblings import SIBLINGS, Siblings, close_siblings
from vnext.server.http.streaming import TURN, Turn
from vnext.server.load_line import report_load
from vnext.server.responses.store import ResponseStore
from vnext.server.routes import ROUTES
from vnext.server.settings import ServerSettings
from vnext.server.tls import AddressUnusable, TlsUnusable, bind, tls_context, unusable, url_at
from vnext.server.views import welcome
from vnext.server.views.log_view import FOLLOWERS, READERS, Readers, end_streams
from vnext.server.views.responses import RESPONSES
from vnext.server.views.weights import TRAINER, Trainer
from vnext.text.files import CheckpointUnreadable
from vnext.text.template import ChatTemplate, TemplateUnreadable
from vnext.text.tokenizer import Tokenizer

ABORT_TIMEOUT_S = 2.0
UNUSABLE = (
    AddressUnusable, CheckpointUnreadable, TemplateUnreadable, TlsUnusable, StoreUnusable, KeysUnusable, TracesUnusable,
    EngineDead, InvalidRequest,
)  # fmt: skip
_ACCEPTED_AT_ONCE = 16  # in one turn of the event loop, a fifth of a millisecond each with what follows


def run_server(settings: ServerSettings, engine_address: str, model_path: str) -> int:
    """Serve until SIGTERM; returns the process's exit code. Prints one sentence on stderr if it cannot start."""
    set_log_levels(settings)
    signal.signal(signal.SIGTERM, _leave)
    settings = msgspec.structs.replace(
        settings,
        engine_address=engine_address,
        model_path=model_path,
        connections_max=room_for(settings.connections_max),
    )
    try:
        asyncio.run(_serve(settings))
    except asyncio.CancelledError:
        return DONE  # SIGTERM, see _leave_waiting
    except EngineNotStarted:
        return FAILED  # the launcher prints the reason
    except UNUSABLE as error:
        write_error(f"vnext serve: {str(error).rstrip('.')}.")
        return FAILED if isinstance(error, EngineDead) else REFUSED
    return DONE


def set_log_levels(settings: ServerSettings) -> None:
    """Set the log level of the settings. The load line has a separate option."""
    log_lines.begin("API server", settings.log_format, settings.log_level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    load_line.log.setLevel(logging.INFO if settings.log_level != "error" else logging.ERROR)


async def _serve(settings: ServerSettings) -> None:
    with _listener(settings) as listener:
        tokenizer = Tokenizer.load(settings.model_path, has_bound=True)  # while the engine starts, and not by the first request
        template = template_of(tokenizer, settings)  # report its errors before loading a model
        ApiKeys(settings)
        require_traces(settings.otlp_traces_endpoint)
        _leave_waiting()
        waiting = _waiting_room(listener, settings)
        addresses = settings.engine_address, *settings.other_engines
        client = await connect_engines(
            addresses, settings.connect_timeout_s, settings.data_parallel_policy, settings.number, settings.roles
        )
        try:
            app = make_app(client, tokenizer, template, settings)
            await _serve_until_signal(app, client, waiting, listener, settings)
        finally:
            await client.close()


def _listener(settings: ServerSettings) -> socket.socket:
    """The socket to accept from. Raises AddressUnusable."""
    return bind(settings.host, settings.port) if settings.listener < 0 else socket.socket(fileno=settings.listener)


async def _serve_until_signal(
    app: web.Application, client: AnyEngineClient, waiting: WaitingRoom, listener: socket.socket, settings: ServerSettings
) -> None:
    runner = make_runner(app)
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=_ACCEPTED_AT_ONCE, ssl_context=tls_context(settings))
    stop = _stop_on_sigterm(client)
    try:
        settle()
        assert runner.server is not None  # since `setup`
        taken = waiting.hand_over(runner.server)
        await site.start()
        listener.listen(BACKLOG)  # connections that may wait, independent of how many asyncio accepts at once
        host, port = listener.getsockname()[:2]
        if settings.number not in range(1, settings.api_server_count):  # of those that start together one says it
            names = ", ".join(app[SERVER_CONTEXT].model_names)
            write_line(f"vnext: serving {names} on {url_at(host, port, settings)}")
        await stop.wait()
        taken.cancel()
        await drain(app, site, settings.drain_s)
    finally:
        await runner.cleanup()


async def drain(app: web.Application, site: web.BaseSite, drain_s: float) -> None:
    """Refuse new requests, wait for the live answers, then abort the rest."""
    context = app[SERVER_CONTEXT]
    context.limiter.close()
    await site.stop()
    if not await context.limiter.wait_empty(drain_s):
        context.client.abort_all("shutdown")
        await context.limiter.wait_empty(ABORT_TIMEOUT_S)


def _leave(number: int, frame: FrameType | None) -> None:
    """Handle a SIGTERM before the connection to the engine core begins: there is nothing to close."""
    raise SystemExit(DONE)


def _leave_waiting() -> None:
    """Make SIGTERM cancel this task from now on. A plain handler runs only when the interpreter does: a signal right before the
    loop begins to wait would go unnoticed, and the handler's exception might leave a half-made socket, for which ZMQ waits
    forever."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in one"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _stop_on_sigterm(client: AnyEngineClient) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            client.abort_all("shutdown")
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
    return stop


def _waiting_room(listener: socket.socket, settings: ServerSettings) -> WaitingRoom:
    """Where clients wait for the model. Raises AddressUnusable."""
    try:
        return WaitingRoom(listener, settings)
    except OSError as error:  # another program bound the port as we did, and listened first
        raise unusable(error, settings.host, settings.port) from error


# ---- waiting -------------------------------------------------------------------------------------------------------
# Waiting: connections that come while the model loads. They are kept unread, and the server takes them over when it is ready.
# Meanwhile probes get their answer: /live is 200, and /health 503 with the part of the weights that is loaded. Behind TLS
# nothing is answered before the server is there.

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


# ---- the application over the table of routes --------------------------------------------------------------------

KEPT_BY_FIRST = ("/v1/files", "/v1/batches")
CLEANUP_TIMEOUT_S = 2.0  # after the drain, only aborted requests are left


def make_app(
    client: AnyEngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
) -> web.Application:
    """The application over a connected engine client. Serve it with `make_runner`."""
    app = web.Application(middlewares=[observe, translate])
    app.on_response_prepare.append(add_headers)
    app[SERVER_CONTEXT] = ServerContext(client, tokenizer, template, settings)
    app[FRONT] = _front(app[SERVER_CONTEXT])
    app[RESPONSES] = ResponseStore(settings.responses_bytes_max, _stored_at(settings))
    app[BACKGROUND] = Background(settings.responses_bytes_max)
    app[SIBLINGS] = Siblings(settings)
    app.on_cleanup.extend((close_background, close_siblings))
    app[CONNECTIONS] = Connections(settings, app[SERVER_CONTEXT].metrics.closed.add)
    if settings.batch_dir and app[SIBLINGS].is_first:
        app[BATCHES] = Batches(app[SERVER_CONTEXT])
    app.on_cleanup.append(_close_work)
    app[TRAINER] = Trainer(client, settings)
    app[READERS], app[FOLLOWERS] = Readers(), set()
    app.on_shutdown.append(end_streams)
    app[TURN] = Turn(settings.sse_ping_interval_s)
    app.cleanup_ctx.extend((report_load, follow_keys))
    app[welcome.ROUTES] = ROUTES
    app[welcome.EXAMPLE] = lambda url: curl_line(url, chat=template is not None, has_key=settings.needs_key)
    for prefix in dict.fromkeys(("", settings.root_path)):
        for route in ROUTES:
            is_kept = route.path.startswith(KEPT_BY_FIRST) and not app[SIBLINGS].is_first
            app.add_routes([getattr(web, route.method.lower())(prefix + route.path, _of_first if is_kept else route.view)])
    return app


async def _of_first(request: web.Request) -> web.StreamResponse:
    return await request.app[SIBLINGS].first(request)


def make_runner(app: web.Application) -> web.AppRunner:
    timeout_s = app[SERVER_CONTEXT].settings.keepalive_timeout_s
    return _Runner(app, app[CONNECTIONS], keepalive_timeout=timeout_s, shutdown_timeout=CLEANUP_TIMEOUT_S)


class _Runner(Runner):
    """A runner that also serves siblings, and runs the application's batches, which ask the server that it serves."""

    async def setup(self) -> None:
        await super().setup()
        await self.app[SIBLINGS].start(self)
        if BATCHES in self.app:
            await self.app[BATCHES].start(self)

    async def cleanup(self) -> None:
        if BATCHES in self.app:
            await self.app[BATCHES].stop()
        await super().cleanup()


def _stored_at(settings: ServerSettings) -> Path | None:
    """The folder of the responses that this API server and those before it in its place have stored."""
    place = settings.number % settings.api_server_count
    return Path(settings.shared_dir) / f"api-{place}.responses" if settings.shared_dir else None


def _front(context: ServerContext) -> Front:
    log, count = logging.getLogger("vnext.server"), context.metrics.http_request
    open_paths = OPEN | welcome.PAGE_PATHS
    return Front(context.settings, context.keys, bool(context.keys), log, count, open_paths, OPERATORS)


async def _close_work(app: web.Application) -> None:
    app[SERVER_CONTEXT].work.close()
    if (images := app[SERVER_CONTEXT].images) is not None:
        images.close()
    if (traces := app[SERVER_CONTEXT].traces) is not None:
        await traces.close()
