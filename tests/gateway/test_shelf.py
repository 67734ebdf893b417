"""The models of one server: loaded when asked for, unloaded when idle or for another, never under a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from vnext.gateway.backends import Backend, Fleet
from vnext.gateway.shelf import Bounds, Loaded, LoadFailed, ModelGone, ModelTooLarge, Shelf
from vnext.server.context.errors import ModelUnknown

FOREVER = Bounds(keep_alive_s=-1, loaded_max=2, memory_bytes=100)


class Servers:
    """A loader of servers that answer at once, and their health. `calls`: what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.broken = ""
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, name: str) -> Loaded:
        self.calls.append(f"load {name}")
        await self.may_load.wait()
        if name == self.broken:
            raise LoadFailed(f"The model {name!r} cannot be loaded: it is broken.")
        self.ends[name] = asyncio.get_running_loop().create_future()
        return Loaded(f"http://{name}", self.ends[name])

    async def unload(self, name: str) -> None:
        self.calls.append(f"unload {name}")
        self.ends[name].set_result(None)

    def needed_bytes(self, name: str) -> int:
        return {"a": 10, "b": 20, "c": 30}[name]

    async def look(self, backend: Backend) -> None:
        backend.trouble = ""

    def watch(self, backend: Backend) -> None:
        pass

    forget = watch


def tried(body: Callable[[Shelf, Servers], Awaitable[None]], bounds: Bounds = FOREVER) -> Servers:
    async def run() -> Servers:
        servers = Servers()
        shelf = Shelf([("a", "long/a"), ("b",), ("c",)], servers, bounds, Fleet((), "prefix"), servers)
        async with asyncio.timeout(5):
            await body(shelf, servers)
            await shelf.close()
        return servers

    return asyncio.run(run())


async def use(shelf: Shelf, *names: str) -> None:
    for name in names:
        async with shelf.using(name) as found:
            assert found == (name or "a")


def test_a_request_loads_its_model_and_the_least_recently_used_makes_room() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "", "b", "long/a", "a", "c")
        assert shelf.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert {name: each["state"] for name, each in shelf.shown().items()} == shelf.states() | {"long/a": "loaded"}
        with pytest.raises(ModelUnknown):
            await use(shelf, "d")

    assert tried(body).calls == ["load a", "load b", "unload b", "load c", "unload a", "unload c"]


def test_a_model_with_a_request_stays() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        async with AsyncExitStack() as stack:
            for name in "ab":
                await stack.enter_async_context(shelf.using(name))
            waiting = asyncio.create_task(use(shelf, "c"))
            await asyncio.sleep(0.05)
            assert not waiting.done() and shelf.states()["c"] == "unloaded"
        await waiting
        assert shelf.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    tried(body)


def test_requests_wait_for_one_load_which_outlives_them() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        servers.may_load.clear()
        waiting = [asyncio.create_task(use(shelf, "a")) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        servers.may_load.set()
        await asyncio.gather(*waiting[1:])
        assert servers.calls == ["load a"] and waiting[0].cancelled()

    tried(body)


def test_a_load_that_fails_is_answered_and_touches_no_other() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "a")
        servers.broken = "b"
        for found in await asyncio.gather(use(shelf, "b"), use(shelf, "b"), return_exceptions=True):
            assert str(found) == "The model 'b' cannot be loaded: it is broken."
        assert shelf.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        servers.broken = ""
        await use(shelf, "b")

    assert tried(body).calls[:4] == ["load a", "load b", "load b", "unload a"]


def test_an_idle_model_is_unloaded_and_one_in_use_is_not() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        async with shelf.using("a"):
            await use(shelf, "b")
            while shelf.states()["b"] == "loaded":
                await asyncio.sleep(0.02)
            assert shelf.states()["a"] == "loaded"

    tried(body, Bounds(keep_alive_s=0, loaded_max=2, memory_bytes=100))


def test_a_server_that_ends_is_started_again_by_the_next_request() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "a")
        servers.ends["a"].set_result(None)
        await asyncio.sleep(0)
        assert shelf.states()["a"] == "unloaded"
        await use(shelf, "a")

    assert tried(body).calls == ["load a", "load a", "unload a"]


def test_models_fit_into_the_memory_together_or_wait() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "a", "b", "c")
        assert shelf.states() == {"a": "unloaded", "b": "unloaded", "c": "loaded"}
        async with shelf.using("c"):
            waiting = asyncio.create_task(use(shelf, "b"))
            await use(shelf, "c")
            await asyncio.sleep(0.05)
            assert not waiting.done() and shelf.states()["b"] == "unloaded"
        await waiting

    assert tried(body, Bounds(-1, 3, memory_bytes=30)).calls == [
        "load a", "load b", "unload a", "unload b", "load c", "unload c", "load b", "unload b",
    ]  # fmt: skip


def test_a_model_that_can_never_fit_unloads_no_other() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "b")
        with pytest.raises(ModelTooLarge, match=r"The model 'c' takes about 0.0 GiB of memory, and there are 0.0 for models"):
            await use(shelf, "c")

    assert tried(body, Bounds(-1, 3, memory_bytes=29)).calls == ["load b", "unload b"]


def test_what_an_unloaded_model_had_stored_is_gone() -> None:
    async def body(shelf: Shelf, servers: Servers) -> None:
        await use(shelf, "a")
        backend = shelf.models[0].backend
        assert shelf.name_at(backend) == "a"
        servers.ends["a"].set_result(None)
        await asyncio.sleep(0)
        with pytest.raises(ModelGone, match="was unloaded"):
            shelf.name_at(backend)

    tried(body)
