"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs. Bodies are vLLM's."""

from __future__ import annotations

import msgspec
from aiohttp import web

from vnext.server.context.server_context import SERVER_CONTEXT, tenant_of
from vnext.server.http.bodies import read_body
from vnext.server.views.operations import model_object


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora_path`: a folder under --lora-root, or one that --lora-modules named."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lora_int_id` is vLLM's and means nothing here."""

    lora_name: str
    lora_int_id: int | None = None


_load = msgspec.json.Decoder(LoadAdapterBody)
_unload = msgspec.json.Decoder(UnloadAdapterBody)


async def load_adapter(request: web.Request) -> web.Response:
    """POST /v1/load_lora_adapter: the new model object."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _load, LoadAdapterBody)
    await context.adapters.load(body.lora_name, body.lora_path, tenant_of(request))
    return web.json_response(model_object(context, body.lora_name))


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /v1/unload_lora_adapter: {"id", "object", "deleted"}."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _unload, UnloadAdapterBody)
    await context.adapters.unload(body.lora_name, tenant_of(request))
    return web.json_response({"id": body.lora_name, "object": "model", "deleted": True})
