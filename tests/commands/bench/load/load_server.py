"""Enough of a server for the load generator: streams a completion, and fails in every way that a client can meet."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

WAIT_S = 60.0


def sse(*values: object) -> bytes:
    return b"".join(b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n" for each in values)


def chunk(*tokens: int, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "a" * len(tokens), "token_ids": list(tokens)}], **more}


CHUNKS = (chunk(5), chunk(6, 7), {"choices": [], "usage": {"completion_tokens": 3}})


async def complete(request: web.Request) -> web.StreamResponse:
    """What the prompt asks for: a stream that ends well, or as it says."""
    prompt = (await request.json())["prompt"]
    if prompt == "refuse":
        return web.json_response({"error": {"message": "No.", "code": "no_such_thing"}}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b": a ping\n\n" + sse(CHUNKS[0]))
    if prompt == "break":
        request.transport.abort()
    elif prompt == "wait":
        await asyncio.sleep(WAIT_S)
    elif prompt == "fail":
        await response.write(sse({"error": {"message": "The engine stopped."}}))
    else:
        await response.write(sse(*CHUNKS[1:], *([] if prompt == "cut" else [b"[DONE]"])))
    return response


async def models(request: web.Request) -> web.Response:
    key = request.headers.get("Authorization", "")
    return web.json_response({"data": [{"id": "m"}]} if key in ("", "Bearer good") else {"error": "no"}, status=200 if key != "Bearer bad" else 401)


@contextmanager
def load_server(app: web.Application | None = None) -> Iterator[str]:
    """Its URL."""
    loop, ready, urls = asyncio.new_event_loop(), threading.Event(), list[str]()
    if app is None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)

    async def begin() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()

    def run() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
