"""Middleware: the layers around every view. Their order matters; the outermost comes first:

    observe    marks the connection as busy, names the request, counts the answer and writes the access line; outside `translate`,
               to see error responses
    translate  turns errors into error objects, of the checks too that it makes before the view: it answers a preflight, which
               carries no key, and refuses all but a few open paths without the key, or, where there is no key, to web pages of
               other sites
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vnext.server.context import identity
from vnext.server.context.api_keys import ApiKeys, shown
from vnext.server.context.errors import DOMAIN_ERRORS, STATUS_GONE, ClientGone, KeyRejected, RoutesClosed, absent, failure_of
from vnext.server.context.identity import KEY_CLIENT, REQUEST_ID, accept_ticket, identify
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.connections import CONNECTIONS
from vnext.server.http.origins import check_origin, is_preflight, preflight_answer
from vnext.server.settings import ServerSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = frozenset({"/", "/docs", "/openapi.json", "/health", "/ping", "/live", "/metrics", "/load", "/version"})
"""The paths that need no key and that any page may read; every other one is guarded, a new one too."""

OPERATORS = frozenset(
    {
        "/update_weights", "/start_weight_update", "/finish_weight_update", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up",
        "/is_sleeping", "/reset_prefix_cache", "/collective_rpc", "/log", "/events", "/server_info",
    }
)  # fmt: skip
"""The routes, by the first part of their paths, that show or change what all tenants have: among several keys, for admin keys."""

log = logging.getLogger("vnext.server")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """See `connections`; name the request, count its answer by the route's path and write the access line."""
    started_s = time.monotonic()
    identify(request)
    accept_ticket(request.headers, request.app[SERVER_CONTEXT].settings)
    if (traces := request.app[SERVER_CONTEXT].traces) is not None:
        traces.accept(request.headers)
    with request.app[CONNECTIONS].busy(request.protocol, request[REQUEST_ID]):
        response = await handler(request)
    resource = request.match_info.route.resource
    route = "other" if resource is None else resource.canonical
    request.app[SERVER_CONTEXT].metrics.http_request(request.method, route, response.status)
    if log.isEnabledFor(logging.INFO):
        elapsed_ms = (time.monotonic() - started_s) * 1e3
        key = shown(request.get(KEY_CLIENT, ""))
        words = request.method, request.path, response.status, elapsed_ms, request[REQUEST_ID], f" key={key}" if key else ""
        log.info("%s %s %d %.0f ms %s%s", *words, extra=_fields(request, response, elapsed_ms, key))
    return response


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn the errors of the checks and of all views into error responses."""
    settings = request.app[SERVER_CONTEXT].settings
    try:
        if is_preflight(request):
            return preflight_answer(request, settings, bool(request.app[SERVER_CONTEXT].keys))
        authorise(request, settings, request.app[SERVER_CONTEXT].keys)
        return await handler(request)
    except DOMAIN_ERRORS as error:
        failure = absent(_path(request)) if isinstance(error, web.HTTPNotFound) else failure_of(error)
        return failure.response(is_anthropic(request), request[REQUEST_ID])
    except (ClientGone, ConnectionError) as error:  # a view's only connection is its client's
        log.debug("a client left within its %s %s: %s", request.method, request.path, error.__cause__ or error)
        return web.Response(status=STATUS_GONE)
    except Exception as error:  # the effect boundary: a server fault in one request must not end the process silently
        request_id = request[REQUEST_ID]
        log.exception("a fault in %s %s (%s)", request.method, request.path, request_id, extra={"request_id": request_id})
        return failure_of(error).response(is_anthropic(request), request_id)


def _fields(request: web.Request, response: web.StreamResponse, elapsed_ms: float, key: str) -> dict[str, Any]:
    """What a JSON line says of a request, in uvicorn's words."""
    return {
        "request_id": request[REQUEST_ID],
        "client_addr": request.remote,
        "method": request.method,
        "path": request.path,
        "http_version": f"{request.version.major}.{request.version.minor}",
        "status_code": response.status,
        "duration_ms": round(elapsed_ms, 3),
    } | ({"api_key": key} if key else {})


def is_anthropic(request: web.Request) -> bool:
    """Whether the request is one of Anthropic's API."""
    return identity.is_anthropic(_path(request), request.headers)


def needs_key(request: web.Request) -> bool:
    """Whether the server has keys and the path is none of those that anyone may ask for."""
    return bool(request.app[SERVER_CONTEXT].keys) and _path(request) not in OPEN


def _path(request: web.Request) -> str:
    return request.path.removeprefix(request.app[SERVER_CONTEXT].settings.root_path)


def authorise(request: web.Request, settings: ServerSettings, keys: ApiKeys) -> None:
    """Check the API key, in constant time so that it cannot be guessed byte by byte, and note the client that it stands for.
    Raises KeyRejected, OriginRejected, RoutesClosed."""
    if _path(request) in OPEN or isinstance(request.match_info.http_exception, web.HTTPNotFound):
        return
    if not keys:
        check_origin(request, settings.allowed_origins)
        return
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = bearer.strip(" ") if scheme.lower() == "bearer" else ""  # a scheme's case does not matter (RFC 9110, 11.1)
    client = keys.client_of(given, request.headers.get("X-Api-Key", ""))
    if client is None:
        raise KeyRejected("The API key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
    if "/" + _path(request).split("/")[1] in OPERATORS and not keys.tenant(client).is_admin:
        raise RoutesClosed("This route is the operator's: send a key that has `admin: true` in the file of keys.")
    request[KEY_CLIENT] = client
