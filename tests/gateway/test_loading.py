"""A server of several models by its HTTP: what clients get while a model loads, when it cannot, and after it was unloaded."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from router_here import RouterHere, Toy

from vnext.gateway.shelf import Bounds, Loaded, LoadFailed, Shelf

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
STREAM = CHAT | {"stream": True}
EVENTS = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"fish"}}]}\n\n', b"data: [DONE]\n\n"


class Loads:
    """A loader of one toy, which answers once `may_load` is set. A "lost" model cannot be loaded, a "huge" one is too large."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.may_load = toy, threading.Event()
        self.ended: asyncio.Future[None] | None = None

    async def load(self, name: str) -> Loaded:
        await asyncio.to_thread(self.may_load.wait, 10)
        if name == "lost":
            raise LoadFailed("The model 'lost' cannot be loaded: it is lost.")
        self.ended = asyncio.get_running_loop().create_future()
        return Loaded(self.toy.url, self.ended)

    async def unload(self, name: str) -> None:
        assert self.ended is not None
        self.ended.set_result(None)

    def needed_bytes(self, name: str) -> int:
        return 2 if name == "huge" else 1


class Several(RouterHere):
    """A server of the models toy, lost and huge."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(http={"sse_ping_interval_s": 0.05})
        self.loads = Loads(toy)

    async def begin(self) -> web.AppRunner:
        runner = await super().begin()
        context, bounds = self.context, Bounds(-1, 1, 1)
        context.shelf = Shelf([("toy",), ("lost",), ("huge",)], self.loads, bounds, context.fleet, context.health)
        context.metrics.follow(context.shelf.states)
        return runner

    def unload(self) -> None:
        async def unload() -> None:
            await self.context.shelf._unload(self.context.shelf.models[0])

        self.in_loop(unload())


async def answer(request: web.Request) -> web.StreamResponse:
    """A stream where one is asked for, else a stored response; a body that says "refuse" is refused."""
    body = json.loads(await request.read() or b"{}")
    if body.get("user") == "refuse":
        return web.json_response({"error": {"message": "No.", "type": "invalid_request_error", "code": "bad"}}, status=400)
    if not body.get("stream"):
        return web.json_response({"id": "resp_1", "path": request.path})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    return response


@pytest.fixture
def several() -> Iterator[Several]:
    with Toy(answer=answer) as toy, Several(toy) as server:
        yield server


def streamed(server: Several, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    """The status and the bytes of a stream; the model may load once a comment has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    server.loads.may_load.set()
    return answer.status, first + answer.read()


def test_a_stream_has_comments_while_its_model_loads(several: Several) -> None:
    status, data = streamed(several, STREAM)
    comments, _, rest = data.rpartition(b": loading\n\n")
    assert status == 200 and rest == b"".join(EVENTS) and set(comments.split(b": loading\n\n")) == {b""}
    assert streamed(several, STREAM) == (200, rest), "a model that is loaded has no comments"


def test_what_fails_after_the_comments_ends_the_stream(several: Several) -> None:
    for body, error in (
        (STREAM | {"user": "refuse"}, {"message": "No.", "code": "bad"}),
        (STREAM | {"model": "lost"}, {"message": "The model 'lost' cannot be loaded: it is lost.", "code": "model_not_loaded"}),
    ):
        several.loads.may_load.clear()
        status, data = streamed(several, body)
        event = json.loads(data.rpartition(b"data: ")[2])
        assert status == 200 and data.startswith(b": loading\n\n") and event["error"].items() >= error.items()
        if body["model"] == "toy":
            several.unload()
    several.loads.may_load.clear()
    status, data = streamed(several, STREAM | {"model": "lost", "max_tokens": 1}, "/v1/messages")
    assert status == 200 and b'\n\nevent: error\ndata: {"type":"error"' in data


def test_failures_have_their_status_where_no_stream_has_begun(several: Several) -> None:
    several.loads.may_load.set()
    status, body, _ = several.call("POST", "/v1/chat/completions", CHAT | {"model": "lost"})
    assert (status, body["error"]["code"]) == (503, "model_not_loaded")
    status, body, _ = several.call("POST", "/v1/chat/completions", CHAT | {"model": "huge"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "model_too_large", "model")
    assert several.call("GET", "/v1/files")[0] == 403
    assert several.call("POST", "/v1/chat/completions", CHAT)[0] == 200 and several.counted("vnext_router_model_loaded") == 1


def test_ollamas_clients_see_every_model_and_which_are_loaded(several: Several) -> None:
    def listed(path: str) -> list[str]:
        status, body, _ = several.call("GET", path)
        assert status == 200 and all(each["model"] == each["name"] and each["digest"] and each["details"] for each in body["models"])
        return [each["name"] for each in body["models"]]

    assert several.call("GET", "/api/version")[0] == 200
    assert (listed("/api/tags"), listed("/api/ps")) == (["toy", "lost", "huge"], [])
    several.loads.may_load.set()
    assert several.call("POST", "/api/chat", CHAT | {"model": "toy:latest"})[0] == 200
    assert (listed("/api/tags"), listed("/api/ps")) == (["toy", "lost", "huge"], ["toy"])
    assert several.call("POST", "/api/show", {"name": "lost:latest"})[1] == {"error": "The model 'lost' cannot be loaded: it is lost."}
    assert several.call("POST", "/v1/chat/completions", CHAT | {"model": "toy:latest"})[0] == 404, "a tag is Ollama's"


def test_a_stored_response_is_served_until_its_model_is_unloaded(several: Several) -> None:
    several.loads.may_load.set()
    assert several.call("POST", "/v1/responses", {"model": "toy", "input": "x"})[1]["id"] == "resp_1"
    follow_up = {"model": "toy", "input": "y", "previous_response_id": "resp_1"}
    assert several.call("GET", "/v1/responses/resp_1")[0] == several.call("POST", "/v1/responses", follow_up)[0] == 200
    several.unload()
    for method, path, body in (("GET", "/v1/responses/resp_1", None), ("POST", "/v1/responses", follow_up)):
        status, answer, _ = several.call(method, path, body)
        assert (status, answer["error"]["code"]) == (404, "not_found") and "its model was unloaded" in answer["error"]["message"]
