"""A router in a thread of this process, for tests, over servers that are here too: real HTTP in both directions."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from vnext.gateway.context import RouterContext
from vnext.gateway.run import make_app, make_runner
from vnext.gateway.settings import RouterSettings
from vnext.server.settings import ServerSettings

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from in_thread import WAIT_S, InThread  # noqa: E402  (needs the path above)


class Toy(InThread):
    """A small OpenAI server that is no vnext: `answer` is its view of every path but /health and /v1/models. `seen`: what came."""

    def __init__(self, *models: str, answer: Callable[[web.Request], Any] | None = None) -> None:
        super().__init__()
        self.models = models or ("toy",)
        self.answer = answer or self.echo
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.cancelled = threading.Event()
        self.health = 200
        self.said: dict[str, Any] = {}
        """Of itself, by path, in place of what it usually says."""

    async def echo(self, request: web.Request) -> web.Response:
        """The port and the path."""
        return web.json_response({"port": self.port, "path": request.path_qs})

    async def begin(self) -> web.AppRunner:
        app = web.Application()
        for path, view in self.views().items():
            app.router.add_get(path, view)
        app.router.add_route("*", "/{path:.*}", self._any)
        return web.AppRunner(app, handler_cancellation=True, access_log=None)

    def views(self) -> dict[str, Any]:
        """Of GET, by path."""
        return {"/health": self._health, "/v1/models": self._models}

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "it is ill"}}, status=self.health)

    async def _models(self, _: web.Request) -> web.Response:
        usual = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        return web.json_response(self.said.get("/v1/models", usual))

    async def _any(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.said:
            return web.json_response(self.said[request.path])
        if request.path == "/server_info":
            raise web.HTTPNotFound
        self.seen.append(request)
        self.bodies.append(await request.read())
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class RouterHere(InThread):
    """The router. Entering waits until `ready` servers (all) are ready."""

    def __init__(self, *backends: str, ready: int | None = None, http: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings = RouterSettings(backends=backends, http=ServerSettings(**http or {}), **settings)
        self._ready = len(backends) if ready is None else ready
        self.context: RouterContext | None = None

    async def begin(self) -> web.AppRunner:
        self.context = RouterContext(self.settings)
        for backend in self.context.fleet:
            self.context.health.watch(backend)
        return make_runner(make_app(self.context))

    async def end(self) -> None:
        await self.context.close()

    def __enter__(self) -> RouterHere:
        super().__enter__()
        self.wait_ready(self._ready)
        return self

    def wait_ready(self, count: int) -> None:
        wait_until(lambda: sum(each.is_ready for each in self.context.fleet) == count)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def counted(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.call("GET", "/metrics")[1]
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, "never came true"
        time.sleep(0.01)
