"""/v1/batches and /v1/files: many requests from one file, answered in the background, as in OpenAI's API. `server/batches` runs
them.

Owns the upload: multipart, bounded in size and pace, written to disk as it comes, beside the event loop and with a turn for
others after each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.batches.service import batches_of
from vnext.server.batches.store import FILE_BYTES_MAX, private, seen, writing
from vnext.server.context.errors import BodyTooSlow
from vnext.server.context.server_context import tenant_of
from vnext.server.http.bodies import PAUSE_S, body_pieces, read_body
from vnext.server.http.forms import Begun, FormReader
from vnext.server.http.pages import Pages, ordered, page_of

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/score", "/v1/rerank",
    "/score", "/rerank",
)  # fmt: skip
"""Those of them that this server has."""
WINDOW = "24h"
BATCH_PAGES = Pages(usual=20, most=100)
METADATA_COUNT_MAX, METADATA_CHARACTERS_MAX = 16, 512
PURPOSES = ("batch",)
FILE_PAGES = Pages(usual=10_000, most=10_000)
NAME_CHARACTERS_MAX = 256
PURPOSE_BYTES_MAX = 64
OTHER_BYTES_MAX = 2**20  # of a body, beside its file


async def create_file(request: web.Request) -> web.Response:
    store = batches_of(request).store
    draft = store.draft(tenant_of(request))
    try:
        async with asyncio.timeout(PAUSE_S + FILE_BYTES_MAX / 1e6):
            with writing():
                name, purpose = await _parts(request, draft)
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose is {purpose!r}: it must be 'batch'.", "purpose")
        if not draft.is_file():
            raise InvalidRequest("file is missing: it is required.", "file")
        return _json(store.add_file(draft, name, purpose, owner=tenant_of(request).owner or UNSET))
    except TimeoutError:
        raise BodyTooSlow("The file came too slowly: send it again.") from None
    finally:
        await _free(draft)


async def list_files(request: web.Request) -> web.Response:
    """GET /v1/files, the newest first: of one `purpose`, the page that `limit`, `after` and `order` ask for."""
    files = seen(batches_of(request).store.files, tenant_of(request))
    if purpose := request.query.get("purpose"):
        files = [file for file in files if file.purpose == purpose]
    return _json(listed(files, request.query, FILE_PAGES))


async def get_file(request: web.Request) -> web.Response:
    return _json(batches_of(request).store.file(request.match_info["file_id"], tenant_of(request)))


async def get_file_content(request: web.Request) -> web.StreamResponse:
    store = batches_of(request).store
    path = store.content(store.file(request.match_info["file_id"], tenant_of(request)).id)
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"})


async def delete_file(request: web.Request) -> web.Response:
    id_ = request.match_info["file_id"]
    store = batches_of(request).store
    await _free(store.delete_file(store.file(id_, tenant_of(request)).id))
    return _json({"id": id_, "object": "file", "deleted": True})


def listed(newest_first: list[Any], query: Mapping[str, str], pages: Pages) -> dict[str, Any]:
    """The page of entries with ids that a query asks for, as a list of OpenAI's API. Raises InvalidRequest."""
    page, has_more = page_of(ordered(newest_first, query), lambda entry: entry.id, query, pages)
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": has_more} | ends


async def _parts(request: web.Request, draft: Path) -> tuple[str, str]:
    """The file's name and purpose; its bytes go into `draft`."""
    reader, part, name, purpose, size = FormReader(request, "the parts purpose and file"), "", "", b"", 0
    with ExitStack() as held:
        async for piece in body_pieces(request, None, "", FILE_BYTES_MAX + OTHER_BYTES_MAX):
            for each in reader.read(piece):
                if isinstance(each, Begun):
                    part = each.name
                    if part == "file":
                        name = (each.filename or "upload.jsonl")[:NAME_CHARACTERS_MAX]
                        file = held.enter_context(open(draft, "wb", opener=private))
                elif part == "file":
                    if (size := size + len(each)) > FILE_BYTES_MAX:
                        raise web.HTTPRequestEntityTooLarge(FILE_BYTES_MAX, size)
                    await asyncio.to_thread(file.write, each)
                elif part == "purpose":
                    purpose = (purpose + each)[:PURPOSE_BYTES_MAX]
            await asyncio.sleep(0)  # the next piece may be here already
    reader.end()
    return name, purpose.decode(errors="replace")


async def _free(left: Path) -> None:
    """Free the bytes of a file that nothing names, beside the event loop. Raises StoreUnusable."""
    with writing():
        await asyncio.to_thread(left.unlink, missing_ok=True)


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None


_DECODER = msgspec.json.Decoder(BatchBody)


async def create_batch(request: web.Request) -> web.Response:
    batches = batches_of(request)
    body = await read_body(request, _DECODER)
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
    batches.its_worker().news.set()
    return _json(batch)


async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches, the newest first: the page that `limit`, `after` and `order` ask for."""
    return _json(listed(seen(batches_of(request).store.batches, tenant_of(request)), request.query, BATCH_PAGES))


async def get_batch(request: web.Request) -> web.Response:
    return _json(batches_of(request).store.batch(request.match_info["batch_id"], tenant_of(request)))


async def cancel_batch(request: web.Request) -> web.Response:
    """POST /v1/batches/{batch_id}/cancel."""
    batches = batches_of(request)
    return _json(batches.its_worker().cancel(batches.store.batch(request.match_info["batch_id"], tenant_of(request))))


def _json(value: Any) -> web.Response:
    return web.json_response(body=msgspec.json.encode(value))
