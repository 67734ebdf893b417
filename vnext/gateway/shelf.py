"""Shelf: the models of one server, each behind a server of its own, which is started when a request names the model.

Owns which of them are loaded: at most `loaded_max`, which fit into `memory_bytes` together and of which the least recently used
makes room for another, and none that has not been used for `keep_alive_s`. A model with requests is never unloaded; requests wait
while theirs is loaded. Starts no process: a Loader does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol

from vnext.gateway.backends import Backend, Fleet
from vnext.gateway.health import Health
from vnext.server.console import write_line
from vnext.server.context.errors import ModelUnknown

LOOK_S = 0.5
GIB = 2**30
State = Literal["unloaded", "loading", "loaded", "unloading"]


class LoadFailed(Exception):
    """A model cannot be loaded: one sentence."""


class Loaded(NamedTuple):
    """The server of a model: its URL, and what is done when it has ended."""

    url: str
    ended: asyncio.Future[None]


class Loader(Protocol):
    """Starts and ends the servers, each known by the first name of its model."""

    async def load(self, name: str) -> Loaded:
        """Start the model's server; returns when it answers. Raises LoadFailed."""

    async def unload(self, name: str) -> None:
        """End it, with its requests."""

    def needed_bytes(self, name: str) -> int:
        """About how much memory the server takes, also before it is there."""


class ModelTooLarge(LoadFailed):
    """A model that would not fit if it were the only one."""


class ModelGone(Exception):
    """What a request is about was kept by a server that has been ended: one sentence."""


class Bounds(NamedTuple):
    """`keep_alive_s`: seconds without a request after which a model is unloaded; below 0 for never. `memory_bytes`: what all
    models may take together."""

    keep_alive_s: float
    loaded_max: int
    memory_bytes: int


class Model:
    """One of them. `uses`: requests that wait for it or run; `used_s`: when the last one ended. Mutable."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.state: State = "unloaded"
        self.uses, self.used_s = 0, 0.0
        self.backend: Backend | None = None
        self.bringing: asyncio.Task[None] | None = None


class Shelf:
    """See the module. Make it in the event loop. Mutable."""

    def __init__(self, names: Sequence[Sequence[str]], loader: Loader, bounds: Bounds, fleet: Fleet, health: Health) -> None:
        """`names` has those of each model; the first model is that of requests which name none."""
        self.models = [Model(each) for each in names]
        self._loader, self._bounds, self._fleet, self._health = loader, bounds, fleet, health
        self._changes = asyncio.Lock()
        self._freed = asyncio.Event()
        self._born_s = int(time.time())
        self._tidying = asyncio.create_task(self._tidy())

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[str]:
        """The model stays loaded until the block ends; gives the name by which its server knows it. Raises ModelUnknown,
        LoadFailed."""
        model = self._named(name)
        model.uses += 1
        try:
            while model.state != "loaded":
                await asyncio.shield(self.bring(model))
            yield name or model.names[0]
        finally:
            model.uses -= 1
            model.used_s = time.monotonic()
            self._freed.set()

    def bring(self, model: Model) -> asyncio.Task[None]:
        """Load it, also if no request waits any more: the task ends when that is done, or raises LoadFailed."""
        if model.bringing is None:
            model.bringing = asyncio.create_task(self._bring(model))
            model.bringing.add_done_callback(lambda task: task.cancelled() or task.exception())  # its requests may have gone
        return model.bringing

    def name_at(self, backend: Backend) -> str:
        """The model of a server that has stored a response. Raises ModelGone."""
        found = next((model.names[0] for model in self.models if model.backend is backend), None)
        if found is None:
            raise ModelGone("That response is gone, since its model was unloaded: send the conversation again.")
        return found

    def states(self) -> dict[str, State]:
        """By each model's first name."""
        return {model.names[0]: model.state for model in self.models}

    def shown(self) -> dict[str, dict[str, Any]]:
        """What /v1/models lists, by name: what a loaded model's server says of it, and the state."""
        found = {}
        for model in self.models:
            for name in model.names:
                usual = {"id": name, "object": "model", "created": self._born_s, "owned_by": "vnext"}
                own = model.backend.identity.models.get(name, {}) if model.backend is not None else {}
                found[name] = usual | own | {"state": model.state}
        return found

    async def close(self) -> None:
        tasks = [self._tidying, *(model.bringing for model in self.models if model.bringing is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._unload(model) for model in self.models if model.state == "loaded"))

    def _named(self, name: str) -> Model:
        found = next((model for model in self.models if not name or name in model.names), None)
        if found is None:
            raise ModelUnknown(f"There is no model {name[:200]!r} here: GET /v1/models lists the models.")
        return found

    async def _bring(self, model: Model) -> None:
        try:
            async with self._changes:
                await self._make_room(self._needed_bytes(model))
                model.state = "loading"
                began_s = time.monotonic()
                found = await self._loader.load(model.names[0])
                backend = model.backend = self._fleet.add(found.url)
                await self._health.look(backend)
                self._health.watch(backend)
                model.state, model.used_s = "loaded", time.monotonic()
                found.ended.add_done_callback(lambda _: self._ended(model, backend))
                write_line(f"vnext: {model.names[0]} is loaded, after {time.monotonic() - began_s:.1f} s")
        finally:
            model.bringing = None
            if model.state == "loading":
                model.state = "unloaded"

    def _needed_bytes(self, model: Model) -> int:
        """What it takes. Raises ModelTooLarge."""
        needed, most = self._loader.needed_bytes(model.names[0]), self._bounds.memory_bytes
        if needed > most:
            sizes = f"{needed / GIB:.1f} GiB of memory, and there are {most / GIB:.1f} for models"
            raise ModelTooLarge(f"The model {model.names[0]!r} takes about {sizes}: lower --kv-cache-memory or take another.")
        return needed

    async def _make_room(self, needed: int) -> None:
        """Unload idle models until a model of `needed` bytes fits; wait while all of them have requests."""
        while loaded := [model for model in self.models if model.state == "loaded"]:
            taken = sum(self._loader.needed_bytes(model.names[0]) for model in loaded)
            if len(loaded) < self._bounds.loaded_max and taken + needed <= self._bounds.memory_bytes:
                return
            self._freed.clear()
            if idle := [model for model in loaded if not model.uses]:
                await self._unload(min(idle, key=lambda model: model.used_s))
            else:
                await self._freed.wait()

    async def _unload(self, model: Model) -> None:
        self._leave(model)
        model.state = "unloading"
        await self._loader.unload(model.names[0])
        model.state = "unloaded"
        write_line(f"vnext: {model.names[0]} is unloaded")

    def _leave(self, model: Model) -> None:
        """Its server gets no more requests."""
        assert model.backend is not None, "a loaded model has a server"
        self._fleet.remove(model.backend)
        self._health.forget(model.backend)
        model.backend = None

    def _ended(self, model: Model, backend: Backend) -> None:
        """A server has ended by itself: the next request starts another one."""
        if model.backend is backend:
            self._leave(model)
            model.state = "unloaded"
            self._freed.set()
            write_line(f"vnext: the server of {model.names[0]} has ended; the next request starts it again")

    async def _tidy(self) -> None:
        """Unload what nothing has used for long."""
        while self._bounds.keep_alive_s >= 0:
            await asyncio.sleep(LOOK_S)
            with suppress(LoadFailed):
                async with self._changes:
                    since_s = time.monotonic() - self._bounds.keep_alive_s
                    for model in self.models:
                        if model.state == "loaded" and not model.uses and model.used_s <= since_s:
                            await self._unload(model)
