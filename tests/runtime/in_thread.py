"""A web server in a thread of this process, for tests: real HTTP on a port of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from typing import Any

from aiohttp import web

WAIT_S = 60.0


class InThread:
    """A web server that runs in a thread, on a port of its own. Subclasses make its runner, in the event loop."""

    def __init__(self) -> None:
        self.port = 0
        self.runner: web.AppRunner | None = None
        self.site: web.TCPSite | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def begin(self) -> web.AppRunner:
        raise AssertionError("a subclass makes the runner")

    async def end(self) -> None:
        """What is closed after the runner."""

    def in_loop(self, work: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def __enter__(self) -> Any:
        self._thread.start()
        if not self._started.wait(WAIT_S) or self.site is None:
            self.__exit__()
            raise AssertionError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        self._loop.close()

    async def _serve(self) -> None:
        try:
            self.runner = await self.begin()
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", self.port)
            await site.start()
            self.site, self.port = site, site.port
            self._started.set()
            await self._stop.wait()
        finally:
            self._started.set()
            if self.runner is not None:
                await self.runner.cleanup()
            await self.end()

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, decoded answer, headers."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = ({"Content-Type": "application/json"} if data is not None else {}) | headers
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, _decoded(response.read()), response.headers
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read()), error.headers


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()
