"""What one turn of the event loop sends to a stream goes out in one write, in order, and nothing is lost at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web

from vnext.server.http.streaming import FRAMES_MAX, TURN, Events, Turn, respond

FRAMES = [b"data: %d\n\n" % number for number in range(9)]


class Counted:
    """A transport that counts its writes."""

    def __init__(self, transport: Any) -> None:
        self._transport, self.writes = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))


async def answer_of(answering: Any, version: aiohttp.HttpVersion = aiohttp.HttpVersion11) -> bytes:
    app = web.Application()
    app[TURN] = Turn()

    async def view(request: web.Request) -> web.StreamResponse:
        return await respond(request, answering)

    app.router.add_get("/", view)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = site._server.sockets[0].getsockname()
    try:
        async with aiohttp.ClientSession(version=version) as session, session.get(f"http://{host}:{port}/") as answer:
            return await answer.read()
    finally:
        await runner.cleanup()


def test_a_turn_writes_once_to_each_stream() -> None:
    counts = []

    async def answering(events: Events) -> None:
        events._transport = counted = Counted(events._transport)
        counts.append(counted)
        for frame in FRAMES[:5]:
            assert events.send(frame)
        assert counted.writes == 0
        await asyncio.sleep(0)
        assert counted.writes == 1, "the head goes with the first frames"
        assert events.send(*FRAMES[5:7])
        await events.room()
        assert counted.writes == 2
        events.send(FRAMES[7])
        events.send_with_end(FRAMES[8])
        await asyncio.sleep(0)

    for version in (aiohttp.HttpVersion11, aiohttp.HttpVersion10):
        assert asyncio.run(answer_of(answering, version)) == b"".join(FRAMES) + b"data: [DONE]\n\n"
        assert counts.pop().writes == 3


def test_a_turn_sends_a_bounded_number_of_frames() -> None:
    async def answering(events: Events) -> None:
        events.send(FRAMES[0])
        await events.room()
        assert [events.send(FRAMES[1]) for _ in range(FRAMES_MAX)] == [True] * (FRAMES_MAX - 1) + [False]
        await events.room()
        assert events.send(FRAMES[1])

    assert asyncio.run(answer_of(answering)).count(b"data: 1") == FRAMES_MAX + 1
