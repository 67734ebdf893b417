"""Ids of requests: a client's own comes back on every response and names its answers; and the system's fingerprint."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest
from edge_server import EdgeServer

from vnext.runtime.protocol.messages import EngineReady, SubmitRequest
from vnext.server.context.identity import client_number, system_fingerprint
from vnext.state.config import SchedulerConfig

PROMPT = {"prompt": "say:hi"}
CHAT = {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 2}
BOTH = pytest.mark.parametrize(
    ("path", "body", "kind"), [("/v1/completions", PROMPT, "cmpl"), ("/v1/chat/completions", CHAT, "chatcmpl")]
)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_s_id_comes_back_and_names_its_answer(
    server: EdgeServer, path: str, body: dict[str, Any], kind: str, stream: bool
) -> None:
    given = "trace/5:a_b.c~d+e=f@g-h"
    status, answer, headers = server.post(path, body | {"stream": stream}, **{"X-Request-Id": given})
    assert status == 200 and headers["X-Request-Id"] == given
    submitted = server.engine.of_kind(SubmitRequest)[-1].name
    assert submitted.startswith(f"{kind}-{given}-")
    reported = answer if stream else answer["id"]
    assert submitted.removesuffix("-0") in reported


@BOTH
def test_the_engine_knows_a_client_by_a_number(server: EdgeServer, path: str, body: dict[str, Any], kind: str) -> None:
    for _ in range(2):
        assert server.post(path, body)[0] == 200
    numbers = {each.client for each in server.engine.of_kind(SubmitRequest)}
    assert len(numbers) == 1 and min(numbers) > 0


def test_a_number_is_a_client_s_alone_and_tells_nothing_without_the_secret() -> None:
    clients = ("127.0.0.1", "10.0.0.1", "2001:db8:0:1", "key 1", "key 1 \udcff", "")
    numbers = {client_number(client, secret) for client in clients for secret in (b"a" * 16, b"b" * 16)}
    assert len(numbers) == 2 * len(clients) and 0 < min(numbers) and max(numbers) < 2**63
    assert client_number("key 1", b"a" * 16) == client_number("key 1", b"a" * 16)


@BOTH
def test_the_body_may_name_the_request_and_the_header_goes_first(server: EdgeServer, path: str, body: Any, kind: str) -> None:
    status, answer, headers = server.post(path, body | {"request_id": "mine"})
    assert headers["X-Request-Id"] == "mine" and answer["id"].startswith(f"{kind}-mine-")
    status, answer, headers = server.post(path, body | {"request_id": "mine"}, **{"X-Request-Id": "yours"})
    assert headers["X-Request-Id"] == "yours" and answer["id"].startswith(f"{kind}-yours-")


def test_without_one_there_is_a_fresh_one(server: EdgeServer) -> None:
    found = [server.post("/v1/completions", PROMPT) for _ in range(2)]
    assert all(answer["id"] == f"cmpl-{headers['X-Request-Id']}" for _, answer, headers in found)
    assert found[0][1]["id"] != found[1][1]["id"]


@pytest.mark.parametrize("bad", ["", " ", "a b", "x" * 129, "é", "a;b", '"a"', "-a", "a,b", "<a>"])
def test_an_id_that_could_not_stand_in_a_log_is_not_taken(server: EdgeServer, bad: str) -> None:
    for headers, body in (({"X-Request-Id": bad}, {}), ({}, {"request_id": bad})):
        status, answer, found = server.post("/v1/completions", PROMPT | body, **headers)
        assert status == 200 and found["X-Request-Id"] != bad and answer["id"] == f"cmpl-{found['X-Request-Id']}"


def test_every_response_has_one(server: EdgeServer) -> None:
    for answer in (
        server.get("/health"),
        server.get("/metrics"),
        server.get("/nothing"),
        server.get("/v1/completions"),
        server.get("/health", Expect="the unexpected"),
        server.post("/v1/completions", {}),
        server.post("/v1/completions", b"{"),
        server.post("/v1/completions", PROMPT | {"model": "x"}),
    ):
        assert len(answer[2]["X-Request-Id"]) == 32
    with EdgeServer(api_keys=("secret",)) as guarded:
        assert guarded.get("/v1/models", **{"X-Request-Id": "a"})[2]["X-Request-Id"] == "a"


def test_two_live_requests_may_have_one_id(server: EdgeServer) -> None:
    server.engine.running.clear()
    before = len(server.engine.of_kind(SubmitRequest))
    sent = []
    for _ in range(2):
        sent.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        data = msgspec.json.encode(PROMPT | {"n": 2})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Request-Id: same\r\n"
        sent[-1].sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    server.engine.wait_for(lambda: len(server.engine.of_kind(SubmitRequest)) == before + 4)
    server.engine.running.set()
    assert all(connection.recv(65536).startswith(b"HTTP/1.1 200") for connection in sent)
    assert len({request.name for request in server.engine.of_kind(SubmitRequest)[before:]}) == 4


def test_the_log_s_lines_name_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with EdgeServer() as server, caplog.at_level("INFO", "vnext.server"):
        server.get("/health", **{"X-Request-Id": "look-for-me"})
        server.context.template = 5
        server.post("/v1/chat/completions", CHAT, **{"X-Request-Id": "and-me"})
    assert "GET /health 200" in caplog.text and "look-for-me" in caplog.text
    assert "a fault in POST /v1/chat/completions (and-me)" in caplog.text


@BOTH
def test_answers_carry_the_system_s_fingerprint(server: EdgeServer, path: str, body: Any, kind: str) -> None:
    found = server.post(path, body)[1]["system_fingerprint"]
    assert found == server.context.identity.fingerprint and found.startswith("fp_") and len(found) == 13
    assert server.post(path, body | {"stream": True})[1].count(f'"system_fingerprint":"{found}"') > 1


def test_the_fingerprint_follows_what_changes_tokens_and_nothing_else() -> None:
    config = SchedulerConfig(block_size=16, page_count=64, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512)
    ready = EngineReady(config=config, model="m", world_size=1, log_dir="", environment={"dtype": "float32"}, model_digest="d")

    def changed(**fields: Any) -> bool:
        return system_fingerprint(msgspec.structs.replace(ready, **fields)) != system_fingerprint(ready)

    assert changed(model_digest="e") and changed(world_size=2) and changed(environment={"dtype": "bfloat16"})
    alike = ready.environment | {"sums": "alike for ranks: 1, 2"}
    assert len({system_fingerprint(msgspec.structs.replace(ready, world_size=ranks, environment=alike)) for ranks in (1, 2)}) == 1
    assert not changed(log_dir="x") and not changed(model="other") and not changed(environment=ready.environment | {"threads": "9"})
