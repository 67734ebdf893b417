"""Run: the router's process. Binds the port, looks at the servers, serves, and drains on SIGTERM or Ctrl-C.

The first signal refuses new requests and lets the streams finish within the drain time; a second one ends them at once. It holds
no state that a file would have to keep: a router that is killed is right again with its first look at the servers.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from vnext.base.exits import DONE, REFUSED
from vnext.base.version import __version__
from vnext.gateway import views
from vnext.gateway.backends import BackendRefused, DecisionsUnusable, NoBackend
from vnext.gateway.context import ROUTER, RouterContext
from vnext.gateway.settings import RouterSettings
from vnext.gateway.shelf import LoadFailed, ModelGone, ModelTooLarge, Shelf
from vnext.runtime.protocol import log_lines
from vnext.server.console import curl_line, say_who_comes_in, write_error, write_line
from vnext.server.context.api_keys import KeysUnusable
from vnext.server.context.errors import Failure, KeyRejected, RoutesClosed
from vnext.server.context.text_work import settle
from vnext.server.http.connections import CONNECTIONS, Connections, Runner, room_for
from vnext.server.http.middleware import FRONT, Front, add_headers, bearer, observe, translate
from vnext.server.routes import ROUTES
from vnext.server.tls import AddressUnusable, TlsUnusable, bind, tls_context, unusable, url_at
from vnext.server.views import welcome

FIRST_LOOK_S = 0.5
"""For the servers' first answers, before clients are served."""
BACKLOG, ACCEPTED_AT_ONCE = 1024, 64


def run_router(settings: RouterSettings, word: str = "router", shelf: Callable[[RouterContext], Shelf] | None = None) -> int:
    """Serve until a signal comes; returns the exit status. Prints one sentence on stderr if it cannot start, as the command `word`.
    `shelf` makes that of a server with several models."""
    http = msgspec.structs.replace(settings.http, connections_max=room_for(2 * settings.http.connections_max) // 2)
    log_lines.begin("router", http.log_format, http.log_level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    say_who_comes_in(http)
    try:
        asyncio.run(_serve(msgspec.structs.replace(settings, http=http), shelf))
    except (AddressUnusable, TlsUnusable, KeysUnusable, BackendRefused, DecisionsUnusable) as error:
        write_error(f"vnext {word}: {str(error).rstrip('.')}.")
        return REFUSED
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass  # before it served
    write_line("vnext: stopped")
    return DONE


async def _serve(settings: RouterSettings, shelf: Callable[[RouterContext], Shelf] | None) -> None:
    http = settings.http
    with bind(http.host, http.port) as listener:
        context = RouterContext(settings, str(listener.getsockname()[1]))
        try:
            runner = make_runner(make_app(context))
            await runner.setup()
            site = web.SockSite(runner, listener, backlog=ACCEPTED_AT_ONCE, ssl_context=tls_context(http))
            signals = _signals()
            if shelf is not None:
                context.shelf = shelf(context)
                context.metrics.follow(context.shelf.states)
            await _look(context)
            settle()
            try:
                await site.start()
                listener.listen(BACKLOG)
                write_line(_start_line(context, listener))
                await signals[0].wait()
                await _drain(context, site, signals[1])
            except OSError as error:
                raise unusable(error, http.host, http.port) from error
            finally:
                await runner.cleanup()
        finally:
            await context.close()


async def _look(context: RouterContext) -> None:
    """Begin to watch the servers; returns when all have answered, or after FIRST_LOOK_S."""
    for backend in context.fleet:
        context.health.watch(backend)
    try:
        async with asyncio.timeout(FIRST_LOOK_S):
            for backend in context.fleet:
                await backend.asked.wait()
    except TimeoutError:
        pass


async def _drain(context: RouterContext, site: web.BaseSite, at_once: asyncio.Event) -> None:
    """Refuse new requests, and wait for the live ones within the drain time or until another signal comes."""
    context.limiter.close()
    await site.stop()
    waits = [asyncio.create_task(context.limiter.wait_empty(context.settings.http.drain_s)), asyncio.create_task(at_once.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that are set by the first and the second signal."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first, second


def _start_line(context: RouterContext, listener: socket.socket) -> str:
    settings, (host, port) = context.settings, listener.getsockname()[:2]
    if context.shelf is not None:
        return f"vnext {__version__}: serving {', '.join(context.shelf.states())} at {url_at(host, port, settings.http)}"
    backends = list(context.fleet)
    ready = sum(each.is_ready for each in backends)
    where = f"{settings.routing_policy} on {url_at(host, port, settings.http)}"
    return f"vnext {__version__}: routing by {where}; {ready} of {len(backends)} servers are ready"


OPEN = frozenset({"/health", "/ping", "/live", "/version", "/metrics", "/", "/docs", "/openapi.json"}) | welcome.PAGE_PATHS
"""Paths that need no key."""
ADMIN = "/router/"
CLEANUP_TIMEOUT_S = 2.0

FAILURES = {
    NoBackend: lambda error: Failure(503, str(error), "server_error", code="no_backend"),
    LoadFailed: lambda error: Failure(503, str(error), "server_error", code="model_not_loaded"),
    ModelTooLarge: lambda error: Failure(400, str(error), param="model", code="model_too_large"),
    ModelGone: lambda error: Failure(404, str(error), code="not_found"),
    BackendRefused: lambda error: Failure(400, f"{error}.", param="backend"),
}


def make_app(context: RouterContext) -> web.Application:
    app = web.Application(middlewares=[observe, translate])
    app[ROUTER] = context
    app[CONNECTIONS] = Connections(context.settings.http, context.metrics.closed.add)
    app.on_response_prepare.append(add_headers)
    app[FRONT] = _front(context)
    pages = [each for each in ROUTES if each.view in welcome.VIEWS or each.path == "/api/version"]
    app[welcome.ROUTES] = tuple(each for each in ROUTES if each in pages or each.path in OPEN or views.passes(each.path))
    app[welcome.EXAMPLE] = lambda url: curl_line(url, chat=True, has_key=bool(context.keys))
    app.add_routes(
        [
            *(web.get(each.path, each.view) for each in pages),
            web.get("/health", views.get_health),
            web.get("/ping", views.get_health),
            web.get("/live", welcome.get_live),
            web.get("/version", welcome.get_version),
            web.get("/metrics", views.get_metrics),
            web.get("/v1/models", views.list_models),
            web.get("/v1/models/{model:.+}", views.get_model),
            web.get("/api/tags", views.list_ollama_models),
            web.get("/api/ps", views.list_ollama_models),
            web.get("/router/backends", views.list_backends),
            web.post("/router/backends", views.add_backend),
            web.delete("/router/backends", views.remove_backend),
            web.post("/router/drain", views.drain_backend),
            web.post("/router/resume", views.resume_backend),
            web.route("*", "/{path:.*}", views.forward),
        ]
    )
    return app


def make_runner(app: web.Application) -> Runner:
    timeout_s = app[ROUTER].settings.http.keepalive_timeout_s
    return Runner(app, app[CONNECTIONS], keepalive_timeout=timeout_s, shutdown_timeout=CLEANUP_TIMEOUT_S)


def _front(context: RouterContext) -> Front:
    def count(method: str, route: str, status: int) -> None:
        context.metrics.http.add(str(status))

    return Front(
        context.settings.http, context.keys, bool(context.keys), logging.getLogger("vnext.routing"), count, OPEN,
        own_check=partial(_judges, context.settings.admin_key), failures=FAILURES,
    )  # fmt: skip


def _judges(admin_key: str, request: web.Request) -> bool:
    """Whether a path is the operator's, whose key is checked. Raises KeyRejected, RoutesClosed."""
    if not request.path.startswith(ADMIN):
        return False
    if not admin_key:
        raise RoutesClosed("The routes below /router are closed: start the router with --admin-key.")
    if not hmac.compare_digest(*(key.encode(errors="surrogateescape") for key in (admin_key, bearer(request)))):
        raise KeyRejected("The admin key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
    return True
