"""App: the router's application over its views, behind the checks and errors of the server's own (server/http/middleware.py)."""

from __future__ import annotations

import hmac
import logging
from functools import partial

from aiohttp import web

from vnext.gateway import views
from vnext.gateway.backends import BackendRefused, NoBackend
from vnext.gateway.context import ROUTER, RouterContext
from vnext.gateway.shelf import LoadFailed, ModelGone, ModelTooLarge
from vnext.server.context.errors import Failure, KeyRejected, RoutesClosed
from vnext.server.http.connections import CONNECTIONS, Connections, Runner
from vnext.server.http.middleware import FRONT, Front, add_headers, bearer, observe, translate

OPEN = frozenset({"/health", "/ping", "/live", "/version", "/metrics"})
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
    """The application. Serve it with `make_runner`."""
    app = web.Application(middlewares=[observe, translate])
    app[ROUTER] = context
    app[CONNECTIONS] = Connections(context.settings.http, context.metrics.closed.add)
    app.on_response_prepare.append(add_headers)
    app[FRONT] = _front(context)
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


def _front(context: RouterContext) -> Front:
    def count(_: web.Request, response: web.StreamResponse) -> None:
        context.metrics.http.add(str(response.status))

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
