"""Connections that come before the server: probes are answered, everything else waits unread and is served by the real server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from vnext.runtime.processes.run_dir import LOADED
from vnext.server.run import WaitingRoom
from vnext.server.settings import ServerSettings
from vnext.server.tls import bind

PEM = Path(__file__).with_name("localhost.pem")
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


class Starting:
    """A server that is not there yet. `serve` brings it; its answers name the method and the body."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServerSettings(port=0, **settings)
        self._listener = bind("127.0.0.1", 0)
        self.room = WaitingRoom(self._listener, self.settings)
        self.port = self._listener.getsockname()[1]
        self._runner = web.ServerRunner(web.Server(self._answer))

    async def serve(self) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self._taken = self.room.hand_over(self._runner.server)
        await web.SockSite(self._runner, self._listener).start()

    async def close(self) -> None:
        await self._runner.cleanup()
        self._listener.close()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"{request.method} {(await request.read()).decode()}")


@asynccontextmanager
async def starting(**settings: Any) -> AsyncIterator[Starting]:
    found = Starting(**settings)
    try:
        yield found
    finally:
        await found.close()


async def answer_to(server: Starting, *pieces: bytes, pause_s: float = 0.0, context: ssl.SSLContext | None = None) -> bytes:
    """What comes back for these bytes until the connection ends, or a whole answer is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b"" if pieces[0].startswith(b"HEAD") else await reader.readexactly(length)
    writer.close()
    return answer + body


def run(story: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("noted", [None, "0", "42", "no number"])
def test_health_says_how_much_is_loaded(tmp_path: Path, noted: str | None) -> None:
    async def story() -> None:
        if noted is not None:
            (tmp_path / LOADED).write_text(noted)
        async with starting(shared_dir=str(tmp_path)) as server:
            head, _, body = (await answer_to(server, HEALTH)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"Connection: close" in head
            assert json.loads(body) == {"status": "loading", "loaded": 0.42 if noted == "42" else 0.0}

    run(story)


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([b"GET /live HTTP/1.1\r\n\r\n"], b"200"),
        ([b"GET /ping?x=1 HTTP/1.0\r\n\r\n"], b"503"),
        ([b"HEAD /llm/health HTTP/1.1\r\n\r\n"], b"503"),
        ([b"GET /hea", b"lth HTTP/1.1\r\nHost: a\r\n", b"\r\n"], b"503"),
    ],
)
def test_probes_are_answered(pieces: list[bytes], answer: bytes) -> None:
    async def story() -> None:
        async with starting(root_path="/llm") as server:
            assert (await answer_to(server, *pieces, pause_s=0.08)).startswith(b"HTTP/1.1 " + answer)

    run(story)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"],
        [b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Le", b"ngth: 2\r\n\r\nh", b"i"],
        [b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"],
        [b"POST /a HTTP/1.1\r\nHost: a\r\nX: " + 5000 * b"x" + b"\r\nContent-Length: 2\r\n\r\nhi"],
    ],
)
def test_requests_wait_for_the_server(pieces: list[bytes]) -> None:
    async def story() -> None:
        async with starting() as server:
            early = asyncio.create_task(answer_to(server, *pieces, pause_s=0.08))
            await asyncio.sleep(0.3)
            assert not early.done()
            await server.serve()
            assert (await early).endswith(b"\r\n\r\nPOST hi")
            assert (await answer_to(server, HEALTH)).endswith(b"GET ")

    run(story)


def test_a_probe_elsewhere_waits() -> None:
    async def story() -> None:
        async with starting(root_path="/llm") as server:
            early = asyncio.create_task(answer_to(server, b"GET /other/health HTTP/1.1\r\nHost: a\r\n\r\n"))
            await asyncio.sleep(0.2)
            assert not early.done()
            await server.serve()
            assert (await early).endswith(b"GET ")

    run(story)


def test_nobody_waits_with_a_server_that_takes_the_place_of_another() -> None:
    async def story() -> None:
        async with starting(number=2, api_server_count=2) as server:
            early = asyncio.create_task(answer_to(server, HEALTH))
            await asyncio.sleep(0.2)
            assert not early.done()
            await server.serve()
            assert (await early).endswith(b"GET ")

    run(story)


def test_who_left_and_who_is_too_many() -> None:
    async def story() -> None:
        async with starting(connections_max=2) as server:
            kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            reader, _ = await asyncio.open_connection("127.0.0.1", server.port)
            assert await reader.read() == b""
            kept[0][1].close()
            answer = b""
            while not answer:  # it is one too many until the server has noticed who left
                with suppress(asyncio.IncompleteReadError, ConnectionError):
                    answer = await answer_to(server, HEALTH)
            assert answer.startswith(b"HTTP/1.1 503")
            await server.serve()
            kept[1][1].write(HEALTH)
            assert (await kept[1][0].readuntil(b"GET ")).startswith(b"HTTP/1.1 200")

    run(story)


def test_behind_tls_everybody_waits() -> None:
    async def story() -> None:
        context = ssl.create_default_context(cafile=str(PEM))
        async with starting(ssl_certfile=str(PEM)) as server:
            early = asyncio.create_task(answer_to(server, HEALTH, context=context))
            await asyncio.sleep(0.2)
            assert not early.done()
            await server.serve()
            assert (await early).endswith(b"GET ")

    run(story)
