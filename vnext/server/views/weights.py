"""Views for trainers: weights, pauses and sleep, by vLLM's names, on a server that --enable-rl-routes opens. docs/weights.md."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.client.engines import AnyEngineClient
from vnext.runtime.client.weight_update import WeightUpdate, file_of, finished
from vnext.runtime.protocol.operations import (
    TAGS,
    AnyOperation,
    CallRanks,
    CheckPiece,
    Mode,
    PauseEngine,
    Plain,
    PutToSleep,
    Residence,
    ResumeEngine,
    SharedTensor,
    UpdateWeights,
    WakeUp,
)
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import RoutesClosed
from vnext.server.http.bodies import read_body
from vnext.server.settings import ServerSettings

MODES: tuple[Mode, ...] = ("wait", "keep", "abort")


class Trainer:
    """The operations of one engine. Each returns its value, or raises NotDone, BadTensors or EngineDead with nothing changed."""

    def __init__(self, client: AnyEngineClient, settings: ServerSettings) -> None:
        self._client, self._settings = client, settings
        self._weight_update: WeightUpdate | None = None

    def require_opened(self, path: str) -> None:
        """Raises RoutesClosed."""
        if not self._settings.enable_rl_routes:
            raise RoutesClosed(f"This server does not open {path} to its clients: start it with --enable-rl-routes.")

    @property
    def residence(self) -> Residence:
        return self._client.stats.residence if self._client.stats is not None else Residence()

    async def update(self, weights: str | Sequence[SharedTensor], mode: Mode, version: int, partial: bool) -> Any:
        """Weights in a folder or file, or in shared memory: all at once, or a piece of an update that was started."""
        update = self._weight_update
        if update is not None:
            update.require_piece(version, mode, partial)
        path = await asyncio.to_thread(file_of, weights, self._settings.engine_address)
        if update is None:
            return await self._do(UpdateWeights(paths=(path,), mode=mode, version=version, partial=partial))
        await self._do(CheckPiece(path=path))
        update.paths.append(path)
        return {}

    def start_update(self, partial: bool) -> None:
        """Begin an update that is sent in pieces; forget one that was not finished."""
        if self._weight_update is not None:
            self._weight_update.forget(self._settings.engine_address)
        self._weight_update = WeightUpdate(partial)

    async def finish_update(self, mode: Mode, version: int) -> Any:
        update, self._weight_update = self._weight_update, None
        return await self._do(finished(update, version, mode))

    async def pause(self, mode: Mode) -> Any:
        return await self._do(PauseEngine(mode=mode))

    async def resume(self) -> Any:
        return await self._do(ResumeEngine())

    async def sleep(self, level: int, mode: Mode) -> Any:
        return await self._do(PutToSleep(level=level, mode=mode))

    async def wake_up(self, tags: Sequence[str]) -> Any:
        """`tags`: of TAGS; none for all."""
        return await self._do(WakeUp(tags=tuple(tag for tag in TAGS if tag in tags) or TAGS))

    async def call(self, function: str, arguments: dict[str, Plain]) -> Any:
        return await self._do(CallRanks(function=function, arguments=arguments))

    def reset_prefix_cache(self) -> None:
        self._client.reset_prefix_cache()

    async def _do(self, operation: AnyOperation) -> Any:
        return await self._client.operate(operation)


TRAINER = web.AppKey("trainer", Trainer)


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
    body = await read_body(request, _update)
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
    trainer.start_update((await read_body(request, _start)).partial if request.can_read_body else False)
    return web.json_response({})


async def finish_weight_update(request: web.Request) -> web.Response:
    """POST /finish_weight_update: answered as /update_weights."""
    trainer = _opened(request)
    body = await read_body(request, _finish) if request.can_read_body else FinishBody()
    return web.json_response(await trainer.finish_update(body.mode, body.version))


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=wait|keep|abort: answered once no step is in flight and, with "wait", nothing that has begun is left."""
    return web.json_response(await _opened(request).pause(_mode(request)))


async def resume(request: web.Request) -> web.Response:
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
    _opened(request).reset_prefix_cache()
    return web.json_response({})


async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc: {"results": one for each rank}."""
    trainer = _opened(request)
    body = await read_body(request, _call)
    return web.json_response({"results": await trainer.call(body.method, body.kwargs)})


def _opened(request: web.Request) -> Trainer:
    """Raises RoutesClosed."""
    trainer = request.app[TRAINER]
    trainer.require_opened(request.path)
    return trainer


def _mode(request: web.Request) -> Mode:
    mode = request.query.get("mode", "wait")
    found = next((each for each in MODES if each == mode), None)
    if found is None:
        raise InvalidRequest(f"mode is {mode!r}: it is one of {', '.join(MODES)}.", "mode")
    return found
