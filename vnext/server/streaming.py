"""Streaming: chunks of an answer as server-sent events.

Owns the response's head, the frames and the way in which a stream that has begun reports an error. Knows no chunk's
content. Nothing is sent before the first chunk exists, so that a refusal still gets its proper HTTP status.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from vnext.server.errors import DOMAIN_ERRORS, failure_of

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a buffering proxy would collect the tokens
}
_DONE = b"data: [DONE]\n\n"

log = logging.getLogger("vnext.server")


async def respond(request: web.Request, chunks: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """Send every chunk, then [DONE]; an error after the first chunk becomes a last chunk of its own."""
    response = web.StreamResponse(headers=_HEADERS)
    async with aclosing(chunks):
        try:
            await _send_all(request, response, chunks)
        except ConnectionError:
            return response  # the client is gone; closing the chunks has aborted its requests
        await response.write_eof()
    return response


async def _send_all(
    request: web.Request, response: web.StreamResponse, chunks: AsyncGenerator[dict[str, Any], None]
) -> None:
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(_frame(chunk))
    except ConnectionError:
        raise
    except Exception as error:  # once a stream has begun, only a chunk can tell; before, the middleware does
        if not response.prepared:
            raise
        if not isinstance(error, DOMAIN_ERRORS):
            log.exception("a fault in the stream of %s", request.path)
        await response.write(_frame(failure_of(error).body()))
    await response.write(_DONE)


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
