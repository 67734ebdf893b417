"""The edge as a server: keys, bounds, metrics, clients that leave, engines that die, and the drain."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai
import pytest
from aiohttp import ClientConnectionResetError
from aiohttp.http import StreamWriter
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.runtime.client.client import EngineClient
from vnext.runtime.protocol.messages import Outputs, RequestOutput, SubmitRequest
from vnext.server.http import streaming
from vnext.server.http.streaming import FRAMES_MAX
from vnext.server.run import drain


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the function returned waits for its result, or its exception as a value."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except openai.OpenAIError as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        return result[0]

    return wait


def ask(server: EdgeServer, **options: Any) -> Callable[[], Any]:
    """A completion that waits at the engine core, which is held."""
    before = len(server.engine.of_kind(SubmitRequest))
    wait = in_thread(lambda: server.openai().completions.create(model="toy", prompt="say:hello", **options))
    server.engine.wait_for(lambda: len(server.engine.of_kind(SubmitRequest)) > before)
    return wait


def raw_request(server: EdgeServer, body: dict[str, Any], *headers: str) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
    return connection


def test_models_version_health(server: EdgeServer) -> None:
    models = server.openai().models.list().data
    assert [model.id for model in models] == ["toy", "other-name"] and models[0].max_model_len == 512
    assert server.openai().models.retrieve("toy").owned_by == "vnext"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("no/such")
    assert server.get("/health")[:2] == (200, {"status": "ok"})
    assert server.get("/version")[1]["version"].count(".") == 2


def test_the_key() -> None:
    with EdgeServer(api_keys=("sécret",)) as server:
        for key in ("wrong", "", "secret"):
            status, answer, headers = server.post("/v1/completions", {"prompt": "a"}, Authorization=f"Bearer {key}")
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"] == "Bearer"
        assert server.get("/v1/models")[0] == 401 and server.get("/v1/nothing")[0] == 404
        assert server.get("/health")[0] == 200 and server.get("/metrics")[0] == 200
    with EdgeServer(api_keys=("secret",)) as server:
        for given in ("bearer secret", "BEARER  secret", "Bearer secret "):
            assert server.get("/v1/models", Authorization=given)[0] == 200
        for given in ("Basic secret", "secret", "Bearersecret", "Bearer secret x", "Bearer"):
            assert server.get("/v1/models", Authorization=given)[0] == 401
        client = server.openai(api_key="secret")
        assert client.completions.create(model="toy", prompt="say:a").choices[0].text == "a"
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            server.openai(api_key="other").models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(stream: bool) -> None:
    with EdgeServer() as server:
        server.engine.running.clear()
        connection = raw_request(server, {"prompt": "a", "n": 2, "stream": stream})
        server.engine.wait_for(lambda: len(server.engine.of_kind(SubmitRequest)) == 2)
        connection.close()
        names = server.engine.wait_aborts("client")
        assert sorted(names) == sorted(request.name for request in server.engine.of_kind(SubmitRequest))
        server.engine.running.set()
        assert server.openai().completions.create(model="toy", prompt="say:a").choices[0].text == "a"


def test_a_client_that_leaves_in_the_middle_of_its_stream() -> None:
    with EdgeServer() as server:
        connection = raw_request(server, {"prompt": "a", "stream": True, "max_tokens": 500})
        assert b"text/event-stream" in connection.recv(1000)
        server.engine.running.clear()
        connection.close()
        assert server.engine.wait_aborts("client")


def test_too_many_at_once() -> None:
    with EdgeServer(live_requests_max=3) as server:
        server.engine.running.clear()
        first = ask(server, n=2)
        status, answer, headers = server.post("/v1/completions", {"prompt": "a", "n": 2})
        assert status == 429 and answer["error"]["code"] == "overloaded" and headers["Retry-After"] == "1"
        status, answer, _ = server.post("/v1/completions", {"prompt": "a", "n": 4})
        assert status == 400 and "at most 3" in answer["error"]["message"]
        server.engine.running.set()
        assert [choice.text for choice in first().choices] == ["hello", "hello"]
        assert server.openai().completions.create(model="toy", prompt="say:a", n=3).choices[2].text == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_are_answered_in_waves(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's bound of inputs, while no more than one request's share is in progress."""
    waves: list[int] = []
    submit_all = EngineClient.submit_all
    monkeypatch.setattr(EngineClient, "submit_all", lambda self, asked: (waves.append(len(asked)), submit_all(self, asked))[1])
    with EdgeServer() as server:
        words = [f"{place:04}" for place in range(600)]
        found = server.openai().completions.create(model="toy", prompt=[f"say:{word}" for word in words], n=2, stream=stream)
        texts = [""] * 1200
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [word for word in words for _ in range(2)]
        assert waves == [256] * 4 + [176] and server.context.limiter.live_count == 0
        status, answer, _ = server.post("/v1/completions", {"prompt": ["a"] * 2049, "stream": stream})
        assert (status, answer["error"]["param"]) == (400, "prompt") and "2049 entries: at most 2048" in answer["error"]["message"]
        status, answer, _ = server.post("/v1/completions", {"prompt": ["a"] * 1025, "n": 2})
        assert (status, answer["error"]["param"]) == (400, "n")
    with EdgeServer(request_answers_max=2) as server:
        status, answer, _ = server.post("/v1/completions", {"prompt": ["a"] * 3})
        assert (status, answer["error"]["param"]) == (400, "prompt") and "at most 2" in answer["error"]["message"]


@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_engine(silently: bool) -> None:
    with EdgeServer() as server:
        server.engine.running.clear()
        waiting = ask(server)
        server.engine.close() if silently else server.engine.die("rank 3 ran out of memory")
        error = waiting()
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code) == (503, "engine_dead")
        status, answer, _ = server.get("/health")
        assert status == 503 and ("lost" if silently else "rank 3") in answer["error"]["message"]
        status, answer, headers = server.post("/v1/completions", {"prompt": "a"})
        assert status == 503 and answer["error"]["code"] == "engine_dead"
        assert re.search(r"^vnext_engine_up{.*} 0.0$", server.get("/metrics")[1], re.MULTILINE)


def test_an_engine_that_dies_within_a_stream() -> None:
    with EdgeServer() as server:
        server.engine.hold()
        stream = server.openai().completions.create(model="toy", prompt="a", stream=True, max_tokens=500)
        next(stream)
        server.engine.die("rank 3 ran out of memory")
        with pytest.raises(openai.APIError, match="rank 3 ran out of memory"):
            list(stream)


def test_a_stream_that_ends_in_an_error_does_not_say_that_it_is_done() -> None:
    with EdgeServer() as server:
        connection = raw_request(server, {"prompt": "a", "stream": True, "max_tokens": 500}, "Connection: close")
        said = connection.recv(1000)
        server.engine.running.clear()
        server.engine.die("rank 3 ran out of memory")
        while piece := connection.recv(65536):
            said += piece
    assert b"rank 3 ran out of memory" in said.rpartition(b"data: ")[2] and b"[DONE]" not in said
    assert said.endswith(b"0\r\n\r\n"), "the answer itself is whole"


@pytest.mark.parametrize("frames_max", [1, FRAMES_MAX], ids=["within the stream", "at its end"])
@pytest.mark.parametrize(
    "error",
    [ClientConnectionResetError("closing"), ConnectionError("lost"), BrokenPipeError(), TimeoutError(), OSError(113, "no route")],
    ids=lambda error: type(error).__name__,
)
def test_any_error_of_the_transport_is_a_client_that_left(
    error: Exception, frames_max: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EdgeServer() as server, monkeypatch.context() as patched:

        async def fail(writer: StreamWriter) -> None:
            patched.undo()
            writer.transport.abort()
            raise error

        patched.setattr(StreamWriter, "drain", fail)
        patched.setattr(streaming, "FRAMES_MAX", frames_max)
        with raw_request(server, {"prompt": "a", "stream": True, "max_tokens": 20}) as connection:
            with suppress(ConnectionError):
                while connection.recv(65536):
                    pass
        wait_until(lambda: server.context.client.live_count == 0)
        assert server.openai().completions.create(model="toy", prompt="say:a").choices[0].text == "a"
    assert caplog.text == ""


def test_a_client_that_leaves_before_the_end_of_its_stream_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """It has its last token and goes, while the server is about to write the end."""
    with EdgeServer() as server:
        for _ in range(20):
            connection = raw_request(server, {"prompt": "say:" + "a" * 30, "stream": True, "max_tokens": 99})
            said = b""
            while b'"finish_reason":"stop"' not in said:
                said += connection.recv(65536)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            connection.close()
        wait_until(lambda: server.context.client.live_count == 0)
        server.get("/health")
    assert caplog.text == ""


def test_the_drain_lets_live_answers_finish() -> None:
    with EdgeServer() as server:
        server.engine.running.clear()
        live = ask(server)
        draining = in_thread(lambda: server.in_loop(drain(server.app, server.site, 10.0)))
        wait_until(lambda: server.context.limiter.closed)
        server.engine.running.set()
        assert live().choices[0].text == "hello"
        draining()
        with pytest.raises(openai.APIConnectionError):
            server.openai().models.list()


def test_a_drain_that_takes_too_long_aborts() -> None:
    with EdgeServer() as server:
        server.engine.running.clear()
        live = ask(server)
        server.in_loop(drain(server.app, server.site, 0.05))
        error = live()
        assert error.status_code == 503 and error.code == "aborted"
        assert len(server.engine.wait_aborts("shutdown")) == 1


def test_a_connection_kept_alive_is_refused_while_draining() -> None:
    with EdgeServer() as server:
        client = server.openai()
        assert client.models.list().data
        server.engine.running.clear()
        live = ask(server)
        draining = in_thread(lambda: server.in_loop(drain(server.app, server.site, 10.0)))
        wait_until(lambda: server.context.limiter.closed)
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(model="toy", prompt="a")
        assert caught.value.status_code == 503
        server.engine.running.set()
        assert live().choices[0].text == "hello"
        draining()


def test_a_fault_of_ours_is_a_plain_500_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with EdgeServer() as server:
        good, server.context.template = server.context.template, 5
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        status, answer, _ = server.post("/v1/chat/completions", body)
        assert status == 500 and answer["error"]["type"] == "server_error" and "int" not in answer["error"]["message"]
        assert "a fault in POST /v1/chat/completions" in caplog.text
        server.context.template = good
        assert server.post("/v1/chat/completions", body)[0] == 200


def test_a_fault_of_ours_within_a_stream(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with EdgeServer() as server:
        server.engine.hold()
        stream = server.openai().completions.create(model="toy", prompt="a", stream=True, max_tokens=500)
        next(stream)
        monkeypatch.setattr(server.context.metrics, "token", None)
        server.engine.running.set()
        with pytest.raises(openai.APIError, match="The server failed on this request"):
            list(stream)
        assert "a fault in the stream of /v1/completions" in caplog.text
        assert server.engine.wait_aborts("client")


def test_access_lines_only_from_info_down(caplog: pytest.LogCaptureFixture) -> None:
    with EdgeServer() as server:
        with caplog.at_level("WARNING"):
            server.get("/health")
        assert caplog.text == ""
        with caplog.at_level("INFO", "vnext.server"):
            server.get("/health")
        assert "GET /health 200" in caplog.text


def test_many_clients_at_once() -> None:
    async def all_of_them(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            calls = [client.completions.create(model="toy", prompt=f"say:{number}") for number in range(60)]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    with EdgeServer() as server:
        assert asyncio.run(all_of_them(server.url)) == [str(number) for number in range(60)]
        assert server.context.client.live_count == 0


def test_a_constraint_that_fails_is_the_requests_own_error() -> None:
    """A client that tries again meets it again: the status is 400, not 503."""
    sentence = "The answer cannot keep to its constraint: too many items."
    with EdgeServer() as server:
        server.engine.running.clear()
        live = ask(server)
        client = server.context.client
        [name] = client._live
        server.in_loop(_deliver(client, RequestOutput(name=name, tokens=b"", finish="abort", error=sentence)))
        error = live()
        assert (error.status_code, error.code, error.body["message"]) == (400, "constraint_failed", sentence)


async def _deliver(client: EngineClient, output: RequestOutput) -> None:
    client._deliver(Outputs(outputs=(output,)))
