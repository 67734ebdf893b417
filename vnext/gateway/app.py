"""App: the router's application over its views, with the checks and errors that stand before each of them."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from vnext.gateway import views
from vnext.gateway.backends import BackendRefused, NoBackend
from vnext.gateway.context import ROUTER, RouterContext
from vnext.server.context.api_keys import shown
from vnext.server.context.errors import (
    DOMAIN_ERRORS,
    STATUS_GONE,
    ClientGone,
    Failure,
    KeyRejected,
    RoutesClosed,
    absent,
    failure_of,
)
from vnext.server.context.identity import ANTHROPIC_ID_HEADER, KEY_CLIENT, REQUEST_ID, add_request_id, identify, is_anthropic
from vnext.server.http.connections import CONNECTIONS, Connections, Runner
from vnext.server.http.origins import check_origin, is_preflight, permit, preflight_answer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = frozenset({"/health", "/ping", "/live", "/version", "/metrics"})
"""Paths that need no key."""
ADMIN = "/router/"
CLEANUP_TIMEOUT_S = 2.0

log = logging.getLogger("vnext.routing")


def make_app(context: RouterContext) -> web.Application:
    """The application. Serve it with `make_runner`."""
    app = web.Application(middlewares=[observe, translate])
    app[ROUTER] = context
    app[CONNECTIONS] = Connections(context.settings.http, context.metrics.closed.add)
    app.on_response_prepare.append(_add_headers)
    app.add_routes(
        [
            web.get("/health", views.get_health),
            web.get("/ping", views.get_health),
            web.get("/live", views.get_live),
            web.get("/version", views.get_version),
            web.get("/metrics", views.get_metrics),
            web.get("/v1/models", views.list_models),
            web.get("/v1/models/{model:.+}", views.get_model),
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
    """A runner that cancels a view when its client disconnects; the view then ends its server's work."""
    return Runner(
        app,
        app[CONNECTIONS],
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=app[ROUTER].settings.http.keepalive_timeout_s,
        auto_decompress=False,  # the view decompresses within its bound
        shutdown_timeout=CLEANUP_TIMEOUT_S,
    )


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """See `connections`; name the request, count its answer and write the access line."""
    started_s = time.monotonic()
    identify(request)
    with request.app[CONNECTIONS].busy(request.protocol, request[REQUEST_ID]):
        response = await handler(request)
    request.app[ROUTER].metrics.http.add(str(response.status))
    if log.isEnabledFor(logging.INFO):
        key, elapsed_ms = shown(request.get(KEY_CLIENT, "")), (time.monotonic() - started_s) * 1e3
        words = request.method, request.path, response.status, elapsed_ms, request[REQUEST_ID], f" key={key}" if key else ""
        log.info("%s %s %d %.0f ms %s%s", *words, extra={"request_id": request[REQUEST_ID]})
    return response


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn the errors of the checks and of all views into error responses."""
    of_anthropic, request_id = is_anthropic(request.path, request.headers), request[REQUEST_ID]
    settings = request.app[ROUTER].settings.http
    try:
        if is_preflight(request):
            return preflight_answer(request, settings, bool(request.app[ROUTER].keys))
        authorise(request)
        return await handler(request)
    except NoBackend as error:
        return Failure(503, str(error), "server_error", code="no_backend").response(of_anthropic, request_id)
    except BackendRefused as error:
        return Failure(400, f"{error}.", param="backend").response()
    except DOMAIN_ERRORS as error:
        failure = absent(request.path) if isinstance(error, web.HTTPNotFound) else failure_of(error)
        return failure.response(of_anthropic, request_id)
    except (ClientGone, ConnectionError) as error:
        log.debug("a client left within its %s %s: %s", request.method, request.path, error.__cause__ or error)
        return web.Response(status=STATUS_GONE)
    except Exception as error:  # the effect boundary: a fault in one request must not end the process silently
        log.exception("a fault in %s %s (%s)", request.method, request.path, request[REQUEST_ID])
        return failure_of(error).response(of_anthropic, request_id)


def authorise(request: web.Request) -> None:
    """Check the key, and note the client that it stands for. Raises KeyRejected, OriginRejected, RoutesClosed."""
    context = request.app[ROUTER]
    if request.path in OPEN:
        return
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = bearer.strip(" ") if scheme.lower() == "bearer" else ""
    if request.path.startswith(ADMIN):
        if not (key := context.settings.admin_key):
            raise RoutesClosed("The routes below /router are closed: start the router with --admin-key.")
        if not hmac.compare_digest(key.encode(errors="surrogateescape"), given.encode(errors="surrogateescape")):
            raise KeyRejected("The admin key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
        return
    if not context.keys:
        check_origin(request, context.settings.http.allowed_origins)
        return
    client = context.keys.client_of(given, request.headers.get("X-Api-Key", ""))
    if client is None:
        raise KeyRejected("The API key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
    request[KEY_CLIENT] = client


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    add_request_id(request, response)
    if is_anthropic(request.path, request.headers):
        response.headers[ANTHROPIC_ID_HEADER] = request[REQUEST_ID]
    context = request.app[ROUTER]
    permit(request, response, context.settings.http, bool(context.keys) and request.path not in OPEN)
