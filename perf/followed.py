"""A server that looks like vnext's and whose events can be followed: a process for perf/bench_router.py.

Owns a real engine state (perf/router.py's), which folds each request's arrival and steps and streams them, and answers at once; a
token is four bytes of the prompt. Its cache is full from the beginning.
"""

from __future__ import annotations

import asyncio
import random
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from aiohttp import web

from perf.router import VOCABULARY, Engine, words
from vnext.base.version import __version__
from vnext.server.context.identity import ENGINES_HEADER

PAGES, PROMPT = 3_500, 1_024
IDENTITY = {"version": __version__, "system_fingerprint": "fp_1", "environment": {"batch_invariant": "yes"}}
COMPLETION = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "demo", "system_fingerprint": "fp_1"}


class Followed:
    """The routes. Mutable."""

    def __init__(self) -> None:
        self._engine = Engine(PAGES)
        rng = random.Random(0)
        for number in range(PAGES * 16 // PROMPT + 1):
            self._engine.arrive(f"r{number}", words(rng, PROMPT), [5])
            self._run()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/events", self._events)
        for path, answer in (("/health", {}), ("/v1/models", {"data": [{"id": "demo"}]}), ("/server_info", IDENTITY)):
            app.router.add_get(path, lambda _, answer=answer: answered(answer))
        return app

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await answered({"tokens": tokens_of(msgspec.json.decode(await request.read())["prompt"])})

    async def _complete(self, request: web.Request) -> web.Response:
        prompt = tokens_of(msgspec.json.decode(await request.read())["prompt"])
        self._engine.arrive(f"cmpl-{request.headers.get('X-Request-Id', '')}-0-0", prompt, [5])
        self._run()
        return await answered(COMPLETION | {"choices": [{"index": 0, "text": " sea", "finish_reason": "length"}]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        parts: asyncio.Queue[bytes] = asyncio.Queue()
        response = web.StreamResponse(headers={ENGINES_HEADER: "1"})
        await response.prepare(request)
        try:
            await response.write(self._engine.streams.begin(parts, self._engine.state))
            while True:
                await response.write(await parts.get())
        finally:
            self._engine.streams.end(parts)

    def _run(self) -> None:
        """Compute all there is; each step's events go to the readers."""
        while self._engine.state.requests:
            for parts, frame in self._engine.step()[1].items():
                parts.put_nowait(frame)


async def answered(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def tokens_of(text: str) -> list[int]:
    data = text.encode()
    return (np.frombuffer(data[: len(data) // 4 * 4], "<u4") % (VOCABULARY - 1) + 1).tolist()


def followed(ready: Connection) -> None:
    """Serve on a port of its own."""

    async def serve() -> None:
        runner = web.AppRunner(Followed().app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.send(site.port)
        await asyncio.Event().wait()

    asyncio.run(serve())
