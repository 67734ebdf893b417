"""What trainers may do with the engine over HTTP, if the settings open it: weights, pauses, sleep. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vnext.runtime.client.connection import weights_folder
from vnext.runtime.client.replicas import AnyEngineClient
from vnext.runtime.client.tensor_file import SharedTensor, write_shared
from vnext.runtime.operations import (
    TAGS,
    AnyOperation,
    CallRanks,
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

    def require_opened(self, path: str) -> None:
        """Raises RoutesClosed."""
        if not self._settings.enable_rl_routes:
            raise RoutesClosed(f"This server does not open {path} to its clients: start it with --enable-rl-routes.")

    @property
    def residence(self) -> Residence:
        return self._client.stats.residence if self._client.stats is not None else Residence()

    async def update(self, path: str, mode: Mode, version: int) -> Any:
        """Weights in a folder or file."""
        return await self._client.operate(UpdateWeights(path=path, mode=mode, version=version))

    async def update_shared(self, tensors: Sequence[SharedTensor], mode: Mode, version: int) -> Any:
        """Weights in shared memory."""
        path = await asyncio.to_thread(write_shared, tensors, weights_folder(self._settings.engine_address))
        try:
            return await self._client.operate(UpdateWeights(path=str(path), mode=mode, version=version, owned=True))
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

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
