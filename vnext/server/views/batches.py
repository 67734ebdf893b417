"""/v1/batches: many requests from one file, answered in the background, as in OpenAI's API. `server/batches` runs them."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.batches.service import batches_of
from vnext.server.batches.store import seen
from vnext.server.context.server_context import tenant_of
from vnext.server.http.bodies import read_body
from vnext.server.http.pages import Pages
from vnext.server.views.files import listed

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/score", "/v1/rerank",
    "/score", "/rerank",
)  # fmt: skip
"""Those of them that this server has."""
WINDOW = "24h"
PAGES = Pages(usual=20, most=100)
METADATA_COUNT_MAX, METADATA_CHARACTERS_MAX = 16, 512


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None


_DECODER = msgspec.json.Decoder(BatchBody)


async def create_batch(request: web.Request) -> web.Response:
    """POST /v1/batches."""
    batches = batches_of(request)
    body = await read_body(request, _DECODER, BatchBody)
    served = {resource.canonical for resource in request.app.router.resources()}
    if body.endpoint not in ENDPOINTS or body.endpoint not in served:
        known = ", ".join(path for path in ENDPOINTS if path in served)
        raise InvalidRequest(f"endpoint is {body.endpoint[:80]!r}: it must be one of {known}.", "endpoint")
    if body.completion_window != WINDOW:
        raise InvalidRequest(f"completion_window is {body.completion_window[:80]!r}: it must be {WINDOW!r}.", "completion_window")
    if len(body.metadata or ()) > METADATA_COUNT_MAX or any(
        len(text) > METADATA_CHARACTERS_MAX for pair in (body.metadata or {}).items() for text in pair
    ):
        raise InvalidRequest(
            f"metadata may have {METADATA_COUNT_MAX} members of {METADATA_CHARACTERS_MAX} characters: shorten it.", "metadata"
        )
    tenant = tenant_of(request)
    input_ = batches.store.file(body.input_file_id, tenant)
    batch = batches.store.add_batch(body.endpoint, input_, body.completion_window, body.metadata, tenant)
    batches.worker.news.set()
    return _json(batch)


async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches, the newest first: the page that `limit`, `after` and `order` ask for."""
    return _json(listed(seen(batches_of(request).store.batches, tenant_of(request)), request.query, PAGES))


async def get_batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{batch_id}."""
    return _json(batches_of(request).store.batch(request.match_info["batch_id"], tenant_of(request)))


async def cancel_batch(request: web.Request) -> web.Response:
    """POST /v1/batches/{batch_id}/cancel."""
    batches = batches_of(request)
    return _json(batches.worker.cancel(batches.store.batch(request.match_info["batch_id"], tenant_of(request))))


def _json(value: Any) -> web.Response:
    return web.json_response(body=msgspec.json.encode(value))
