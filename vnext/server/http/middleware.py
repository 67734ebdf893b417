"""Middleware: the layers around every view, of the server and of the router. Their order matters; the outermost comes first:

    observe    marks the connection as busy, names the request, counts the answer and writes the access line; outside `translate`,
               to see error responses
    translate  turns errors into error objects, of the checks too that it makes before the view: it answers a preflight, which
               carries no key, and refuses all but a few open paths without the key, or, where there is no key, to web pages of
               other sites

`add_headers` completes the head of every response, even where aiohttp responds before any middleware.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from vnext.server.context.api_keys import ApiKeys, shown
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
from vnext.server.context.identity import (
    ANTHROPIC_ID_HEADER,
    KEY_CLIENT,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    api_of,
    client_of,
    identify,
)
from vnext.server.http.connections import CONNECTIONS
from vnext.server.http.origins import check_origin, is_from_a_page, is_preflight, permit, preflight_answer
from vnext.server.settings import ServerSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STARTS_A_TURN = 8
"""Requests that begin in one turn of the event loop, a third of a millisecond each: a thousand that arrive together would otherwise
begin in one turn, and no stream would get a token meanwhile."""
OPEN = frozenset({"/", "/docs", "/openapi.json", "/health", "/ping", "/live", "/metrics", "/load", "/version"})
"""The paths that need no key and that any page may read; every other one is guarded, a new one too."""

OPERATORS = frozenset(
    {
        "/update_weights", "/start_weight_update", "/finish_weight_update", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up",
        "/is_sleeping", "/reset_prefix_cache", "/collective_rpc", "/log", "/start_profile", "/stop_profile", "/events",
        "/server_info",
    }
)  # fmt: skip
"""The routes, by the first part of their paths, that show or change what all tenants have: among several keys, for admin keys."""


class Starts:
    """Lets STARTS_A_TURN requests begin in a turn; the others wait in line, and clients take turns. Mutable."""

    def __init__(self) -> None:
        self._left = STARTS_A_TURN
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def turn(self, client: str) -> None:
        """Wait until a client's request may begin; at once where few do."""
        if self._left == STARTS_A_TURN:
            asyncio.get_running_loop().call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        begun = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(begun)
        await begun

    def _next(self) -> None:
        """The next turn has come: those in line go first."""
        self._left = STARTS_A_TURN
        while self._left and self._lines:
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            begun = line.popleft()
            if line:
                self._lines[client] = line
            if not begun.done():  # its client is still there
                begun.set_result(None)
                self._left -= 1
        if self._left < STARTS_A_TURN:
            asyncio.get_running_loop().call_soon(self._next)


class Front(msgspec.Struct, frozen=True):
    """What stands before the views of an application. `count` gets an answer's method, route and status. `open_paths` need no key;
    `operators` are for admin keys. `own_check`: of paths that are not for keys; whether it has judged one.
    `failures`: of errors that only this application has. `starts`: the line before the views."""

    settings: ServerSettings
    keys: ApiKeys
    has_keys: bool
    log: logging.Logger
    count: Callable[[str, str, int], None]
    open_paths: frozenset[str] = OPEN
    operators: frozenset[str] = frozenset()
    own_check: Callable[[web.Request], bool] | None = None
    failures: Mapping[type[Exception], Callable[[Any], Failure]] = {}
    starts: Starts = msgspec.field(default_factory=Starts)


FRONT = web.AppKey("front", Front)


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """See `connections`; name the request, count its answer and write the access line."""
    started_s, front = time.monotonic(), request.app[FRONT]
    identify(request)
    connection = request.app[CONNECTIONS].busy(request.protocol, request[REQUEST_ID])
    try:
        response = await handler(request)
    finally:
        connection.rest()
    resource = request.match_info.route.resource
    front.count(request.method, "other" if resource is None else resource.canonical, response.status)
    if front.log.isEnabledFor(logging.INFO):
        elapsed_ms = (time.monotonic() - started_s) * 1e3
        key = shown(request.get(KEY_CLIENT, ""))
        words = request.method, request.path, response.status, elapsed_ms, request[REQUEST_ID], f" key={key}" if key else ""
        front.log.info("%s %s %d %.0f ms %s%s", *words, extra=_fields(request, response, elapsed_ms, key))
    return response


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn the errors of the checks and of all views into error responses."""
    front = request.app[FRONT]
    path = request.path.removeprefix(front.settings.root_path)
    try:
        if request.method == "OPTIONS" and is_preflight(request):
            return preflight_answer(request, front.settings, front.has_keys)
        authorise(request, front, path)
        if path not in front.open_paths:
            await front.starts.turn(client_of(request))
        return await handler(request)
    except (ClientGone, ConnectionError) as error:  # a view's only connection is its client's
        front.log.debug("a client left within its %s %s: %s", request.method, request.path, error.__cause__ or error)
        return web.Response(status=STATUS_GONE)
    except Exception as error:  # the effect boundary: a server fault in one request must not end the process silently
        api = api_of(path, request.headers)
        return failure_at(request, front, error).response(api, request[REQUEST_ID])


def failure_at(request: web.Request, front: Front, error: Exception) -> Failure:
    """An error as its client sees it; a fault of the server is logged, too."""
    if isinstance(error, web.HTTPNotFound):
        return absent(request.path.removeprefix(front.settings.root_path))
    if (form := front.failures.get(type(error))) is not None:
        return form(error)
    if not isinstance(error, DOMAIN_ERRORS):
        request_id = request[REQUEST_ID]
        words = "a fault in %s %s (%s)", request.method, request.path, request_id
        front.log.error(*words, exc_info=error, extra={"request_id": request_id})
    return failure_of(error)


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


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request in the head of its response, and let the page that asks read it, if it may."""
    front = request.app[FRONT]
    path = request.path.removeprefix(front.settings.root_path)
    if REQUEST_ID not in request:
        identify(request)
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    if api_of(path, request.headers) == "anthropic":
        response.headers[ANTHROPIC_ID_HEADER] = request[REQUEST_ID]
    needs_key = front.has_keys and path not in front.open_paths
    if needs_key or front.settings.allowed_origins:
        permit(request, response, front.settings, needs_key)


def authorise(request: web.Request, front: Front, path: str) -> None:
    """Check the API key, in constant time so that it cannot be guessed byte by byte, and note the client that it stands for.
    Raises KeyRejected, OriginRejected, RoutesClosed."""
    if path in front.open_paths or isinstance(request.match_info.http_exception, web.HTTPNotFound):
        return
    if front.own_check is not None and front.own_check(request):
        return
    if not front.has_keys:
        if is_from_a_page(request):
            check_origin(request, front.settings.allowed_origins)
        return
    client = front.keys.client_of(bearer(request), request.headers.get("X-Api-Key", ""))
    if client is None:
        raise KeyRejected("The API key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
    if "/" + path.split("/")[1] in front.operators and not front.keys.tenant(client).is_admin:
        raise RoutesClosed("This route is the operator's: send a key that has `admin: true` in the file of keys.")
    request[KEY_CLIENT] = client


def bearer(request: web.Request) -> str:
    """The bearer token of a request, "" for none. A scheme's case does not matter (RFC 9110, 11.1)."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip(" ") if scheme.lower() == "bearer" else ""
