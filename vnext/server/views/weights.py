"""Views for trainers: weights, pauses and sleep, by vLLM's names, on a server that --enable-rl-routes opens. docs/weights.md."""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.context.trainer import TAGS, Mode, Plain, SharedTensor, Trainer
from vnext.server.http.bodies import read_body

MODES: tuple[Mode, ...] = ("wait", "keep", "abort")


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either the `path` of a folder or safetensors file that the ranks can read, or `tensors` in POSIX shared memory. With
    `partial` tensors that are not there stay as they are."""

    path: str | None = None
    tensors: list[SharedTensor] | None = None
    mode: Mode = "wait"
    version: int = 0
    partial: bool = False


class StartBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of UpdateBody that belong to the start of an update in pieces."""

    partial: bool = False


class FinishBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of UpdateBody that belong to its end."""

    mode: Mode = "wait"
    version: int = 0


class CallBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`method` is the name of a function that ranks know; arguments go by name, in `kwargs`."""

    method: str
    kwargs: dict[str, Plain] = {}


_update = msgspec.json.Decoder(UpdateBody)
_start, _finish = msgspec.json.Decoder(StartBody), msgspec.json.Decoder(FinishBody)
_call = msgspec.json.Decoder(CallBody)


async def update_weights(request: web.Request) -> web.Response:
    """POST /update_weights: {"version", "digest"} once every rank computes with the new weights; {} for a piece of an update."""
    trainer = _opened(request)
    body = await read_body(request, _update, UpdateBody)
    if body.tensors is not None and body.path is None:
        return web.json_response(await trainer.update(body.tensors, body.mode, body.version, body.partial))
    if body.path is None or body.tensors is not None:
        raise InvalidRequest("Give either path or tensors: the new weights come from one of them.", "path")
    if not Path(body.path).is_absolute():
        raise InvalidRequest(f"path is {body.path!r}: give an absolute one, as the server sees it.", "path")
    return web.json_response(await trainer.update(body.path, body.mode, body.version, body.partial))


async def start_weight_update(request: web.Request) -> web.Response:
    """POST /start_weight_update: the calls of /update_weights that follow are one change of the weights."""
    trainer = _opened(request)
    trainer.start_update((await read_body(request, _start, StartBody)).partial if request.can_read_body else False)
    return web.json_response({})


async def finish_weight_update(request: web.Request) -> web.Response:
    """POST /finish_weight_update: answered as /update_weights."""
    trainer = _opened(request)
    body = await read_body(request, _finish, FinishBody) if request.can_read_body else FinishBody()
    return web.json_response(await trainer.finish_update(body.mode, body.version))


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=wait|keep|abort: answered once no step is in flight and, with "wait", nothing that has begun is left."""
    return web.json_response(await _opened(request).pause(_mode(request)))


async def resume(request: web.Request) -> web.Response:
    """POST /resume."""
    return web.json_response(await _opened(request).resume())


async def sleep(request: web.Request) -> web.Response:
    """POST /sleep?level=1|2&mode=..."""
    trainer, level = _opened(request), request.query.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequest(f"level is {level!r}: 1 keeps the weights' files, 2 forgets the weights.", "level")
    return web.json_response(await trainer.sleep(int(level), _mode(request)))


async def wake_up(request: web.Request) -> web.Response:
    """POST /wake_up?tags=weights&tags=kv_cache; without tags, of both."""
    trainer, named = _opened(request), request.query.getall("tags", [])
    if wrong := [tag for tag in named if tag not in TAGS]:
        raise InvalidRequest(f"There is no part {wrong[0]!r}: tags are {', '.join(TAGS)}.", "tags")
    return web.json_response(await trainer.wake_up(named))


async def is_sleeping(request: web.Request) -> web.Response:
    """GET /is_sleeping: what sleeps too, and the ranks' resident bytes."""
    now = _opened(request).residence
    return web.json_response(
        {"is_sleeping": bool(now.asleep), "asleep": list(now.asleep), "resident_bytes": now.resident_bytes}
    )


async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused: the mode and the version of the weights too."""
    now = _opened(request).residence
    return web.json_response({"is_paused": bool(now.paused), "mode": now.paused, "version": now.version, "digest": now.digest})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache."""
    _opened(request).reset_prefix_cache()
    return web.json_response({})


async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc: {"results": one for each rank}."""
    trainer = _opened(request)
    body = await read_body(request, _call, CallBody)
    return web.json_response({"results": await trainer.call(body.method, body.kwargs)})


def _opened(request: web.Request) -> Trainer:
    """Raises RoutesClosed."""
    trainer = request.app[SERVER_CONTEXT].trainer
    trainer.require_opened(request.path)
    return trainer


def _mode(request: web.Request) -> Mode:
    mode = request.query.get("mode", "wait")
    found = next((each for each in MODES if each == mode), None)
    if found is None:
        raise InvalidRequest(f"mode is {mode!r}: it is one of {', '.join(MODES)}.", "mode")
    return found
