"""What trainers may do with the engine over HTTP, if the settings open it: weights, pauses, sleep. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vnext.runtime.client.engines import AnyEngineClient
from vnext.runtime.client.shared_tensor import SharedTensor
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
    UpdateWeights,
    WakeUp,
)
from vnext.server.context.errors import RoutesClosed
from vnext.server.settings import ServerSettings

__all__ = ["TAGS", "Mode", "Plain", "SharedTensor", "Trainer"]


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
