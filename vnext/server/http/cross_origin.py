"""Cross-origin requests: the headers that let a page of an allowed origin read the server's answers (CORS, Fetch standard).

`origins` decides which origins are allowed. All others get no headers, and their browser withholds the answer. Where a key is
needed and no origins are named, any page is allowed: a foreign one does not know the key, and no browser adds it.
"""

from __future__ import annotations

from aiohttp import web

from vnext.server.context.errors import OriginRejected
from vnext.server.context.identity import ANTHROPIC_ID_HEADER, REQUEST_ID_HEADER
from vnext.server.http.origins import ANY, allows
from vnext.server.settings import ServerSettings

MAX_AGE_S = 600
METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks before it sends a page's request. It has no key, so none is checked."""
    headers = request.headers
    return request.method == "OPTIONS" and bool(headers.get("Origin")) and "Access-Control-Request-Method" in headers


def preflight_answer(request: web.Request, settings: ServerSettings, has_keys: bool) -> web.Response:
    """The answer to a preflight. Raises OriginRejected."""
    origin = request.headers["Origin"]
    if not allows(origin, _allowed(settings, has_keys)):
        raise OriginRejected(f"A web page of {origin[:200]} asks: start the server with --allowed-origins and that page's address.")
    return web.Response(status=204, headers=_permissions(request, settings))


def _permissions(request: web.Request, settings: ServerSettings) -> dict[str, str]:
    methods = METHODS if ANY in settings.allowed_methods else ", ".join(settings.allowed_methods)
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = asked if ANY in settings.allowed_headers else ", ".join(settings.allowed_headers)
    granted = {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": str(MAX_AGE_S)}
    return granted | ({"Access-Control-Allow-Headers": headers} if headers else {})


def _allowed(settings: ServerSettings, has_keys: bool) -> tuple[str, ...]:
    return settings.allowed_origins or ((ANY,) if has_keys else ())


def permit(request: web.Request, response: web.StreamResponse, settings: ServerSettings, has_keys: bool) -> None:
    """Let the page that asks read the response, if the settings allow it; `has_keys`: the path needs a key."""
    allowed = _allowed(settings, has_keys)
    if not allowed:
        return
    origin = request.headers.get("Origin")
    anyone = ANY in allowed and not (settings.allow_credentials and settings.allowed_origins)
    if not anyone:
        response.headers.add("Vary", "Origin")  # a cache must not give one page's permission to another
    if origin is None or not allows(origin, allowed):
        return
    response.headers["Access-Control-Allow-Origin"] = ANY if anyone else origin
    response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID_HEADER}, {ANTHROPIC_ID_HEADER}"
    if settings.allow_credentials and settings.allowed_origins:
        response.headers["Access-Control-Allow-Credentials"] = "true"
