"""Middleware: what every request passes on its way to a view. Order matters, the outermost first:

    observe    counts the answer and writes the access line, so it must see what the others made of an error
    translate  turns errors into error objects
    authorise  refuses /v1, tokens and the log without the key; inside `translate`, because it refuses by raising
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from vnext.server.edge import EDGE
from vnext.server.errors import DOMAIN_ERRORS, KeyRejected, failure_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GUARDED = ("/v1", "/tokenize", "/detokenize", "/log")

log = logging.getLogger("vnext.server")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every answer by the route's own path."""
    started_s = time.monotonic()
    response = await handler(request)
    resource = request.match_info.route.resource
    route = "other" if resource is None else resource.canonical
    request.app[EDGE].metrics.http_request(request.method, route, response.status)
    if log.isEnabledFor(logging.INFO):
        elapsed_ms = (time.monotonic() - started_s) * 1e3
        log.info("%s %s %d %.0f ms", request.method, request.path, response.status, elapsed_ms)
    return response


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One wrapper for all views' errors."""
    try:
        return await handler(request)
    except DOMAIN_ERRORS as error:
        return failure_of(error).response()
    except Exception as error:  # the effect boundary: one request's fault of ours must not end the process silently
        log.exception("a fault in %s %s", request.method, request.path)
        return failure_of(error).response()


@web.middleware
async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compares in constant time, so that the key cannot be guessed byte by byte."""
    key = request.app[EDGE].settings.api_key
    if key and request.path.startswith(GUARDED):
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {key}".encode()):
            raise KeyRejected("The API key is missing or wrong: send the header 'Authorization: Bearer <key>'.")
    return await handler(request)
