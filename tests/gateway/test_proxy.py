"""The router over small servers: what passes, where it goes, and what comes back when they fail, refuse or are drained."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from router_here import WAIT_S, RouterHere, Toy, wait_until

from vnext.gateway import exchange
from vnext.gateway.backends import BackendRefused, normal_url

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "What is the sea? " * 20}]}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Toy, Toy, RouterHere]]:
    with Toy() as first, Toy() as second, RouterHere(first.url, second.url, admin_key="admin") as router:
        yield first, second, router


def test_a_request_passes_with_its_body_and_its_path(pair: tuple[Toy, Toy, RouterHere]) -> None:
    first, second, router = pair
    body = json.dumps(CHAT, indent=3).encode()
    status, answer, headers = router.call("POST", "/v1/chat/completions?a=%2Fb", body, X_Request_Id="mine", TE="x", Cookie="c=1", X_Vnext_Handover="{}")
    assert status == 200 and answer["path"] == "/v1/chat/completions?a=%2Fb" and headers["X-Request-Id"] == "mine"
    [toy] = [each for each in (first, second) if each.bodies and each.bodies[-1] == body]
    seen = toy.seen[-1].headers
    assert seen["X-Request-Id"] == "mine" and seen["X-Forwarded-For"] == "127.0.0.1" and seen["Host"] == f"127.0.0.1:{toy.port}"
    assert not {"TE", "Cookie", "X-Vnext-Handover"} & set(seen)
    assert router.call("POST", "/v1/audio/speech", b"\0bytes", Content_Type="application/octet-stream")[0] == 200
    assert router.call("POST", "/v1/embeddings", gzip.compress(body), Content_Encoding="gzip")[0] == 200
    assert (first.bodies + second.bodies).count(body) == 2, "what was compressed arrives plain"


def test_a_conversation_stays_where_its_prefix_is(pair: tuple[Toy, Toy, RouterHere]) -> None:
    _, _, router = pair
    ports = []
    for speaker in range(6):
        messages = [{"role": "user", "content": f"{speaker} speaks of the sea and what lives in it. " * 10}]
        for _ in range(3):
            ports.append(router.call("POST", "/v1/chat/completions", {"model": "toy", "messages": messages})[1]["port"])
            messages = [*messages, {"role": "assistant", "content": "Fish."}, {"role": "user", "content": "And else?"}]
    turns = [set(ports[start : start + 3]) for start in range(0, len(ports), 3)]
    assert [len(each) for each in turns] == [1] * 6, "each conversation is on one server"
    assert len(set.union(*turns)) == 2, "and they are on both"


def test_models_health_and_paths_that_do_not_pass(pair: tuple[Toy, Toy, RouterHere]) -> None:
    _, _, router = pair
    assert [model["id"] for model in router.call("GET", "/v1/models")[1]["data"]] == ["toy"]
    assert router.call("GET", "/v1/models/toy")[0] == 200 and router.call("GET", "/v1/models/no/such")[0] == 404
    version = {"anthropic-version": "2023-06-01"}
    listed = router.call("GET", "/v1/models", **version)[1]
    assert [model["type"] for model in listed["data"]] == ["model"] and (listed["first_id"], listed["has_more"]) == ("toy", False)
    assert router.call("GET", "/v1/models/toy", **version)[1]["display_name"] == "toy"
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in router.call("GET", path)[1]["models"]] == ["toy"]
    status, answer, headers = router.call("GET", "/v1/models/nope", **version)
    assert (status, answer["type"], answer["request_id"]) == (404, "error", headers["request-id"])
    assert router.call("GET", "/health")[1] == {"status": "ok", "ready": 2}
    status, answer, _ = router.call("POST", "/v1/completions", {"model": "other", "prompt": "a"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    status, answer, _ = router.call("POST", "/update_weights", {})
    assert status == 403 and "ask that server itself" in answer["error"]["message"]
    assert [router.call("GET", path)[0] for path in ("/nothing", "/v1/../sleep", "/v1/%2e%2e/sleep", "//v1/models")] == [404] * 4
    assert router.call("POST", "/v1/messages/batches", {})[0] == 200, "a path below /v1 is the server's to judge"


def test_a_browser_finds_the_page_and_the_paths_that_pass() -> None:
    with RouterHere(http={"api_keys": ("sk-one",)}) as router:
        for path in ("/", "/docs", "/page/index.html"):
            status, page, headers = router.call("GET", path, Accept="text/html")
            assert status == 200 and "page/main.js" in page and "default-src 'self'" in headers["Content-Security-Policy"]
        status, text, _ = router.call("GET", "/")
        assert status == 200 and "POST /v1/chat/completions" in text and "/pause" not in text
        assert f"curl -s http://127.0.0.1:{router.port}/v1/chat/completions" in text and "Authorization: Bearer" in text
        paths = router.call("GET", "/openapi.json")[1]["paths"]
        assert {"/v1/messages", "/health", "/api/tags"} < paths.keys() and not paths.keys() & {"/sleep", "/log", "/v1/load_lora_adapter"}


def test_a_model_decides_among_servers() -> None:
    with Toy("a", "both") as first, Toy("b", "both") as second, RouterHere(first.url, second.url) as router:
        assert {model["id"] for model in router.call("GET", "/v1/models")[1]["data"]} == {"a", "b", "both"}
        for model, toy in (("a", first), ("b", second)):
            ports = {router.call("POST", "/v1/completions", {"model": model, "prompt": str(n)})[1]["port"] for n in range(4)}
            assert ports == {toy.port}
        second.health = 503
        router.wait_ready(1)
        status, answer, headers = router.call("POST", "/v1/completions", {"model": "b", "prompt": "x"})
        assert status == 503 and "serves 'b' at this moment" in answer["error"]["message"] and headers["Retry-After"]


def test_keys_stay_at_the_router() -> None:
    with Toy() as toy, RouterHere(toy.url, http={"api_keys": ("sk-mine",)}, backend_api_key="sk-theirs") as router:
        assert router.call("POST", "/v1/completions", CHAT)[0] == 401
        assert router.call("POST", "/rerank", CHAT)[0] == 401 and router.call("GET", "/health")[0] == 200
        assert router.call("POST", "/v1/completions", CHAT, Authorization="Bearer sk-mine")[0] == 200
        assert router.call("POST", "/v1/messages", CHAT, X_Api_Key="sk-mine")[0] == 200
        assert [each.headers.get("Authorization") for each in toy.seen] == ["Bearer sk-theirs"] * 2
        assert all("X-Api-Key" not in each.headers for each in toy.seen)
        status, answer, _ = router.call("GET", "/router/backends", Authorization="Bearer sk-mine")
        assert status == 403 and "--admin-key" in answer["error"]["message"]
    with Toy() as toy, RouterHere(toy.url) as router:
        assert router.call("POST", "/v1/completions", CHAT, Authorization="Bearer own")[0] == 200
        assert toy.seen[-1].headers["Authorization"] == "Bearer own", "a router without keys passes the client's"
        status, answer, _ = router.call("POST", "/v1/completions", CHAT, Origin="http://evil.example")
        assert status == 403 and answer["error"]["code"] == "origin_rejected"


def test_a_server_that_refuses_connections_is_out_at_once() -> None:
    with Toy() as first, RouterHere(first.url, "http://127.0.0.1:9", ready=1, routing_policy="round_robin") as router:
        assert [router.call("POST", "/v1/completions", CHAT)[0] for _ in range(4)] == [200] * 4
        with Toy() as second:
            assert router.call("GET", "/health")[1]["ready"] == 1
            for each in router.context.fleet:  # it is believed to be there, as between two looks
                each.trouble = ""
                each.identity = next(iter(router.context.fleet)).identity
            assert [router.call("POST", "/v1/completions", CHAT)[0] for _ in range(4)] == [200] * 4
            assert [each.is_ready for each in router.context.fleet] == [True, False]
            assert router.counted("vnext_router_backend_failures_total") == 1
            del second


def busy(status: int, retry_after: str = "") -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=status, headers={"Retry-After": retry_after} if retry_after else {})

    return answer


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_passed_over_and_its_words_are_the_last_resort(status: int) -> None:
    with Toy(answer=busy(status, "30")) as first, Toy() as second, RouterHere(first.url, second.url, routing_policy="round_robin") as router:
        answers = [router.call("POST", "/v1/completions", CHAT) for _ in range(4)]
        assert [each[1]["port"] for each in answers] == [second.port] * 4
        second.answer = busy(status, "7")
        found, answer, headers = router.call("POST", "/v1/completions", CHAT)
        assert (found, answer["error"]["message"], headers["Retry-After"]) == (status, "busy", "7")
        second.answer = busy(400)
        assert 400 in {router.call("POST", "/v1/completions", CHAT)[0] for _ in range(2)}


def test_a_server_that_ends_before_its_answer_is_replaced() -> None:
    async def end(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    with Toy(answer=end) as first, Toy() as second, RouterHere(first.url, second.url) as router:
        assert router.call("POST", "/v1/completions", CHAT)[1]["port"] == second.port
        first.answer = first.echo
        router.wait_ready(2)  # it answers, so it is in again


def events_of(count: int, gate: asyncio.Event | None = None, breaks: bool = False) -> Any:
    """A view that streams events, the last after `gate`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(count):
            await response.write(b'data: {"n": %d}\n\n' % number)
        if gate is not None:
            await gate.wait()
        if breaks:
            await response.write(b'data: {"torn')
            request.transport.abort()
            raise ConnectionError
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def stream(router: RouterHere, path: str = "/v1/chat/completions") -> socket.socket:
    body = json.dumps(CHAT | {"stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", router.port), timeout=WAIT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with connection:
        while part := connection.recv(65536):
            data += part
    return data


def test_a_stream_of_another_kind_of_server_that_breaks_ends_with_an_error() -> None:
    with Toy(answer=events_of(3, breaks=True)) as toy, RouterHere(toy.url) as router:
        data = read_all(stream(router))
        assert data.count(b'{"n":') == 3 and b"backend_lost" in data and b"[DONE]" not in data and data.endswith(b"0\r\n\r\n")
        assert b"torn" not in data, "no part of an event passes"
        assert router.counted("vnext_router_streams_lost_total") == 1


def test_an_answer_that_breaks_is_no_whole_one() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = exchange.WHOLE_BYTES_MAX * 2
        await response.prepare(request)
        await response.write(bytes(exchange.WHOLE_BYTES_MAX))
        request.transport.abort()
        return response

    with Toy(answer=answer) as toy, RouterHere(toy.url) as router:
        data = read_all(stream(router, "/v1/embeddings"))
        assert len(data) < 2 * exchange.WHOLE_BYTES_MAX


@pytest.mark.parametrize("events", [2, 0])
def test_a_client_that_leaves_ends_the_servers_work(events: int) -> None:
    with Toy(answer=events_of(events, asyncio.Event())) as toy, RouterHere(toy.url) as router:
        connection = stream(router)
        wait_until(lambda: len(toy.seen) == 1)
        connection.close()
        assert toy.cancelled.wait(WAIT_S)
        wait_until(lambda: all(each.live == each.waiting_tokens == 0 for each in router.context.fleet))


def test_a_drain_waits_for_streams_and_lets_nothing_new_in() -> None:
    gate = asyncio.Event()
    with Toy(answer=events_of(2, gate)) as first, Toy() as second, RouterHere(first.url, second.url, admin_key="k") as router:
        def admin(method: str, path: str) -> tuple[int, Any, Any]:
            return router.call(method, path, Authorization="Bearer k")

        assert router.call("POST", f"/router/drain?backend={first.url}")[0] == 401
        while not first.seen:
            connection = stream(router)
            wait_until(lambda: first.seen or second.seen)
            second.seen.clear()
        early = admin("POST", f"/router/drain?backend={first.url}&timeout=0.05")[1]
        assert early["drained"] is False and early["running"] == 1
        drained: list[Any] = []
        waiting = threading.Thread(target=lambda: drained.append(admin("POST", f"/router/drain?backend={first.url}")))
        waiting.start()
        assert {router.call("POST", "/v1/completions", CHAT)[1]["port"] for _ in range(4)} == {second.port}
        first.in_loop(_set(gate))
        waiting.join(WAIT_S)
        assert b"[DONE]" in read_all(connection) and drained[0][1]["drained"] is True
        admin("POST", f"/router/resume?backend={first.url}")
        assert router.call("GET", "/health")[1]["ready"] == 2


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_servers_come_and_go() -> None:
    with Toy() as first, Toy("new") as second, RouterHere(first.url, admin_key="k") as router:
        status, shown, _ = router.call("POST", f"/router/backends?backend={second.url}/v1", Authorization="Bearer k")
        assert status == 200 and shown["ready"] and shown["models"] == ["new"] and shown["view"] == "approximate"
        assert router.call("POST", "/v1/completions", {"model": "new", "prompt": "a"})[1]["port"] == second.port
        status, answer, _ = router.call("POST", f"/router/backends?backend={second.url}", Authorization="Bearer k")
        assert status == 400 and "is a backend already" in answer["error"]["message"]
        assert router.call("DELETE", f"/router/backends?backend={first.url}", Authorization="Bearer k")[0] == 200
        assert [each["backend"] for each in router.call("GET", "/router/backends", Authorization="Bearer k")[1]] == [second.url]
        status, answer, _ = router.call("POST", "/v1/completions", CHAT)
        assert status == 404 and "no model 'toy'" in answer["error"]["message"]
        assert router.call("DELETE", f"/router/backends?backend={first.url}", Authorization="Bearer k")[0] == 400


def test_what_is_no_server_gets_no_requests() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    with Toy(answer=page) as toy, Toy() as good, RouterHere(toy.url, good.url) as router:
        toy._models = page
        toy.models = ()
        router.wait_ready(1)
        [trouble] = [each.trouble for each in router.context.fleet if not each.is_ready]
        assert "does not answer /v1/models as an OpenAI server does" in trouble


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999", "http://x?a=1", "http://user:secret@x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BackendRefused) as refused:
        normal_url(url)
    assert "secret" not in str(refused.value)


def test_too_large_too_many_and_a_drain_of_the_router() -> None:
    gate = asyncio.Event()
    with Toy(answer=events_of(1, gate)) as toy, RouterHere(toy.url, http={"body_bytes_max": 2**12, "live_requests_max": 1}) as router:
        assert router.call("POST", "/v1/completions", CHAT | {"user": "x" * 5000})[0] == 413
        assert router.call("POST", "/v1/completions", gzip.compress(bytes(10**7)), Content_Encoding="gzip")[0] == 413
        connection = stream(router)
        wait_until(lambda: len(toy.seen) == 1)
        status, answer, headers = router.call("POST", "/v1/completions", CHAT)
        assert status == 429 and headers["Retry-After"]
        router.context.limiter.close()
        assert router.call("POST", "/v1/completions", CHAT)[0] == router.call("GET", "/health")[0] == 503
        toy.in_loop(_set(gate))
        assert b"[DONE]" in read_all(connection)
        assert router.in_loop(router.context.limiter.wait_empty(WAIT_S))
