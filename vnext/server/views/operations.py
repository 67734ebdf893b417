"""Views for operation: the models, LoRA adapters that come and go, the server's health, its version and its metrics."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.operations import CallRanks
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.chat_request import chat_prompt
from vnext.server.answers.generation import OnlyEncodes, admitted
from vnext.server.call import Call, admit
from vnext.server.context.conversation import check_calls
from vnext.server.context.errors import Aborted, RoutesClosed
from vnext.server.context.identity import SHOWING_PATHS, VERSION_HEADER, client_of
from vnext.server.context.openai_types import ChatBody
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, tenant_of
from vnext.server.http.bodies import read_body
from vnext.server.http.pages import anthropic_model, anthropic_page
from vnext.server.views.log_view import log_folder
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models, in Anthropic's shape for a request that names a version of its API."""
    context = request.app[SERVER_CONTEXT]
    names = (*context.model_names, *context.adapters.names(tenant_of(request)))
    models = [model_object(context, name) for name in names]
    if VERSION_HEADER in request.headers:
        return web.json_response(anthropic_page(models, request.query))
    return web.json_response({"object": "list", "data": models})


async def get_model(request: web.Request) -> web.Response:
    context = request.app[SERVER_CONTEXT]
    model = model_object(context, context.model_name(request.match_info["model"], client_of(request)))
    return web.json_response(anthropic_model(model) if VERSION_HEADER in request.headers else model)


async def get_health(request: web.Request) -> web.Response:
    """GET /health and its synonym /ping: 200 while the server accepts requests and the engine answers, else 503. A log that lacks
    frames harms no answer, and is named."""
    context = request.app[SERVER_CONTEXT]
    context.limiter.check_open()
    context.check_health()
    stats = context.client.stats
    lost = 0 if stats is None else stats.log_frames_lost
    words = f"The log lacks {lost} frames, which could not be written: make room in its folder, or mend its disk."
    return web.json_response({"status": "ok"} | ({"log": words} if lost else {}))


async def get_load(request: web.Request) -> web.Response:
    """GET /load: how many answers wait or run, as in vLLM."""
    return web.json_response({"server_load": request.app[SERVER_CONTEXT].limiter.live_count})


async def get_server_info(request: web.Request) -> web.Response:
    """GET /server_info: what a report of a problem should name."""
    context = request.app[SERVER_CONTEXT]
    ready = context.client.ready
    info = {
        "version": __version__,
        "system_fingerprint": context.identity.fingerprint,
        "models": context.model_names,
        "max_model_len": context.bounds.model_length,
        "world_size": ready.world_size,
        "role": context.settings.role,
        "scheduler": msgspec.structs.asdict(ready.config),
        "environment": ready.environment,
    }
    return web.json_response(body=msgspec.json.encode(info))


async def get_metrics(request: web.Request) -> web.Response:
    text = request.app[SERVER_CONTEXT].metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def model_object(context: ServerContext, name: str) -> dict[str, Any]:
    """A model, or an adapter with the model as its parent, as OpenAI's API describes it."""
    return {
        "id": name,
        "object": "model",
        "created": context.identity.started_s,
        "owned_by": "vnext",
        "root": name,
        "parent": None if name in context.model_names else context.model_names[0],
        "max_model_len": context.bounds.model_length,
    }


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
    body = await read_body(request, _load)
    await context.adapters.load(body.lora_name, body.lora_path, tenant_of(request))
    return web.json_response(model_object(context, body.lora_name))


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /v1/unload_lora_adapter: {"id", "object", "deleted"}."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _unload)
    await context.adapters.unload(body.lora_name, tenant_of(request))
    return web.json_response({"id": body.lora_name, "object": "model", "deleted": True})


# ---- handover ------------------------------------------------------------------------------------------------------
# POST /handover: computes a prompt, or encodes its inputs, for another server, and answers with the ticket by which that one gets
# the blocks, or the vectors. For routers (vnext/gateway). The answer is worth nothing by itself: a server without the cluster's
# secret gets neither.


class HandoverBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, as POST /tokenize says its tokens, or a chat's body, which may show images."""

    model: str | None = None
    tokens: list[int] | None = None
    chat: ChatBody | None = None
    cache_salt: str | None = None


_handover = msgspec.json.Decoder(HandoverBody)


async def hand_over(request: web.Request) -> web.Response:
    """POST /handover: {"ticket", "cached_tokens"}; the ticket is "" where there is none. With `path` the body is that
    route's."""
    if (role := request.app[SERVER_CONTEXT].settings.role) not in ("prefill", "encode"):
        raise RoutesClosed("This server computes nothing for others: start it with --role prefill or encode.")
    if role == "encode" and (path := request.query.get("path", "")) in SHOWING_PATHS:
        return await _encoded(request, path)
    call = await admit(request, "handover", _handover)
    context, body = call.context, call.body
    model = context.model_name(body.model, call.client)
    with context.limiter.enter(1, call.client):
        if body.chat is not None:
            check_calls(body.chat.messages)
            found = await chat_prompt(context, body.chat, call.client)
            prompt = found.packed or pack_tokens(found.tokens)
        elif body.tokens is not None:
            context.check_tokens(body.tokens, "tokens", context.bounds.listed_tokens_max)
            prompt = pack_tokens(body.tokens)
        else:
            raise InvalidRequest("tokens is missing: send it, or chat.", "tokens")
        asked = SubmitRequest(
            name=call.names, prompt=prompt, sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
            cache_salt=context.keys.salts.get(call.client, "") + (body.cache_salt or ""), hands_over=role == "prefill",
            adapter=context.adapter(model, call.client), client=context.identity.client_number(call.client),
            inputs_ticket=call.inputs_ticket, weight=context.keys.weights.get(call.client, 1),
        )  # fmt: skip
        return await handed_over(call, asked)


async def _encoded(request: web.Request, path: str) -> web.Response:
    """The ticket of what a body of the route at `path` shows or plays first. Raises as that route, and as handed_over."""
    route = await request.app.router.resolve(request.clone(rel_url=path))
    try:
        await route.handler(request)
    except OnlyEncodes as found:
        with found.call.context.limiter.enter(1, found.call.client):
            return await handed_over(found.call, found.request)
    return web.json_response({"ticket": "", "cached_tokens": 0})  # nothing was to be computed


async def handed_over(call: Call, asked: SubmitRequest) -> web.Response:
    """The ticket, "" where there is nothing to hand over, and the tokens that the cache had. Raises Refused, EngineDead, Aborted,
    Overloaded, RequestTimedOut."""
    context = call.context
    context.check_engine()
    ticket, cached = context.client.ready.inputs_ticket, 0
    if context.settings.role == "encode":
        from vnext.runtime.client.encode import of_inputs
        from vnext.state.store.inputs import has_inputs

        if not has_inputs(asked.prompt):
            return web.json_response({"ticket": "", "cached_tokens": 0})
        asked = of_inputs(asked)
    async with admitted(call, [unpack_tokens(asked.prompt).tolist()]):
        with closing(context.client.submit_all([asked])) as stream:
            async for output in stream:
                if output.finish == "abort":
                    raise Aborted("The engine ended the request before the prompt was computed: send it again.")
                ticket, cached = output.ticket or ticket, output.cached_tokens or cached
    return web.json_response({"ticket": ticket, "cached_tokens": cached})


# ---- profiles ----------------------------------------------------------------------------------------------------
# The kernels' calls of the engine's next steps, within its log's timeline, by vLLM's names. A process of its own reads the log and
# draws, so that answers go on; with --show-log and to viewers of the log alone. Of several engines the first one is drawn.

KEPT = 8
"""Profiles beside a log; the oldest one goes."""
DRAWING_TIMEOUT_S = 300.0


async def start_profile(request: web.Request) -> web.Response:
    """POST /start_profile: {"room": calls of kernels on each rank}. Raises LogHidden, and NotDone where a profile runs already."""
    log_folder(request)
    rooms = await request.app[SERVER_CONTEXT].client.operate(CallRanks(function="start_profile"))
    return web.json_response({"room": min(rooms)})


async def stop_profile(request: web.Request) -> web.Response:
    """POST /stop_profile: what `vnext-replay profile --calls` says, with the path of the timeline. Raises as start_profile."""
    folder, client = log_folder(request), request.app[SERVER_CONTEXT].client
    values = await client.operate(CallRanks(function="stop_profile"))
    calls = await asyncio.to_thread(_write, folder, msgspec.json.encode(values[: client.ready.world_size]))
    words = ("profile", str(folder), "--calls", str(calls), "-o", str(calls.with_suffix(".json")), "--json")
    drawing = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "vnext.replay", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        umask=0o077,
    )
    try:
        printed, complaint = await asyncio.wait_for(drawing.communicate(), DRAWING_TIMEOUT_S)
    except TimeoutError:
        raise NotDone(f"the timeline was not drawn within {DRAWING_TIMEOUT_S:g} s; the calls are in {calls}") from None
    finally:
        if drawing.returncode is None:
            drawing.kill()
    if drawing.returncode:
        raise NotDone(f"the timeline was not drawn: {complaint.decode(errors='replace').strip()[-500:].rstrip('.')}")
    return web.Response(body=printed, content_type="application/json")


def _write(folder: Path, data: bytes) -> Path:
    """A file of its own for these calls. Raises NotDone."""
    older = sorted(folder.glob("profile-*.calls"))
    number = int(older[-1].stem.rpartition("-")[2]) + 1 if older else 1
    path = folder / f"profile-{number:06}.calls"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        for each in older[: max(0, len(older) + 1 - KEPT)]:
            each.unlink(missing_ok=True)
            each.with_suffix(".json").unlink(missing_ok=True)
    except OSError as error:
        raise NotDone(f"the calls cannot be written beside the log: {reason(error)}") from error
    return path
