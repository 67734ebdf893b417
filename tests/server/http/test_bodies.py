"""Bodies: their kind, their pace and the number of their values are bounded before anything is made of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from edge_server import EdgeServer

from vnext.server.context.admission import Quota
from vnext.server.http import bodies
from vnext.server.http.bodies import Values

PROMPT = {"prompt": "say:hi"}


PAGES = [{"Origin": "http://127.0.0.1"}, {"Sec-Fetch-Site": "same-origin"}]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/octet-stream", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/api/generate"])
def test_a_program_need_not_say_that_it_sends_json(server: EdgeServer, kind: str, path: str) -> None:
    """As `curl -d` does not; a page must, since its browser lets it send any other type without asking the server first."""
    body = {"model": server.get("/v1/models")[1]["data"][0]["id"], **PROMPT, "messages": [{"role": "user", "content": "say:hi"}]}
    if path != "/v1/chat/completions":
        del body["messages"]
    else:
        del body["prompt"]
    assert server.post(path, body, **{"Content-Type": kind})[0] == 200
    for page in PAGES:
        status, answer, _ = server.post(path, body, **{"Content-Type": kind}, **page)
        told = answer["error"] if path.startswith("/api/") else answer["error"]["message"]
        assert status == 415 and "'Content-Type: application/json'" in told


@pytest.mark.parametrize("kind", ["application/jsonp", "multipart/form-data", "text/html"])
def test_what_is_said_to_be_something_else_is_not_read(server: EdgeServer, kind: str) -> None:
    assert server.post("/v1/completions", PROMPT, **{"Content-Type": kind})[0] == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_by_any_of_its_names_is_read(server: EdgeServer, kind: str) -> None:
    assert server.post("/v1/completions", PROMPT, **{"Content-Type": kind})[0] == 200


@pytest.mark.parametrize(
    ("charset", "status"), [("us-ascii", 200), ('"UTF-8"', 200), ("latin-1", 415), ("UTF-16; boundary=a", 415), ("'cp1252'", 415)]
)
def test_json_comes_in_utf_8(server: EdgeServer, charset: str, status: int) -> None:
    for kind in ("application/json", "text/plain", ""):
        found, answer, _ = server.post("/v1/completions", PROMPT, **{"Content-Type": f"{kind}; a=b;charset = {charset}"})
        assert found == status and ("charset is" in json.dumps(answer)) == (status == 415)


def test_a_pages_body_without_any_kind_is_refused(server: EdgeServer) -> None:
    """A page can send such a one: it is a Blob's."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    answer = raw(server, head)
    assert answer.startswith(b"HTTP/1.1 415") and b"has no Content-Type" in answer


def counted(text: bytes, size: int) -> list[int]:
    """Commas, lists, objects and quotes outside strings, of a text that comes in parts."""
    values = Values(10**9)
    for start in range(0, len(text), size):
        values.count(text[start : start + size])
    return [*values._counts, values._quotes]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "body",
    [
        {"a": [1, 2, [3], {}], "b": {"c": {}}},
        {"a,[{": 'one, [two], {three} \\ " \\" ', "b": ["\\", '"', "\\\\", '\\"', ","]},
        ["\\" * 9, "[" * 9, '"' * 9, [","]],
        [{"content": "x, [y]\\"}] * 5,
    ],
)
def test_values_are_counted_as_a_parser_counts_them(body: Any, size: int) -> None:
    commas = lists = objects = texts = 0

    def walk(value: Any) -> None:
        nonlocal commas, lists, objects, texts
        if isinstance(value, (list, dict)):
            commas += max(0, len(value) - 1)
            lists, objects = lists + isinstance(value, list), objects + isinstance(value, dict)
            for each in value:
                walk(each)
                if isinstance(value, dict):
                    walk(value[each])
        texts += isinstance(value, str)

    walk(body)
    assert counted(json.dumps(body, separators=(",", ":")).encode(), size) == [commas, lists, objects, 2 * texts]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"1," * bodies.NUMBERS_MAX + b"1,1]", "values"),
        (b"[" * (bodies.GROUPS_MAX + 1), "lists"),
        (b'{"a":' * (bodies.GROUPS_MAX + 1), "objects"),
        (b'""' * (bodies.STRINGS_MAX + 1), "texts"),
    ],
)
def test_too_many_values_are_refused_before_they_are_decoded(
    server: EdgeServer, monkeypatch: pytest.MonkeyPatch, body: bytes, words: str
) -> None:
    monkeypatch.setattr(bodies, "_decode", lambda *_: pytest.fail("it was decoded"))
    for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
        status, answer, _ = server.post(path, body)
        assert status == 400 and f" {words}: send several requests" in answer["error"]["message"]


def test_a_text_full_of_commas_is_one_value(server: EdgeServer) -> None:
    status, answer, _ = server.post("/v1/completions", {"prompt": ",[{" * bodies.NUMBERS_MAX})
    assert "values" not in answer["error"]["message"]


def test_bodies_have_a_bound_together_and_a_client_a_part_of_it() -> None:
    with EdgeServer() as server:
        server.context.body_bytes = Quota(4000, 2000, "{} bytes of bodies are being read")
        status, answer, headers = server.post("/tokenize", {"prompt": "a" * 2500})
        assert status == 429 and "bound of 2000" in answer["error"]["message"] and headers["Retry-After"]
        assert server.post("/tokenize", {"prompt": "a" * 1500})[0] == 200
        assert server.context.body_bytes.amount == 0


def test_a_body_that_hardly_comes_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one takes four times as long as a pause may: 20 s pass between two looks at the clock."""
    data, looks = msgspec.json.encode(PROMPT | {"user": "x" * 400}), itertools.count(0.0, 20.0)
    with EdgeServer() as server:
        with monkeypatch.context() as slow:
            for name, value in {"PAUSE_S": 60.0, "BYTES_PER_S_MIN": 1, "time": SimpleNamespace(monotonic=lambda: next(looks))}.items():
                slow.setattr(bodies, name, value)
            assert b"200 OK" in send_slowly(server, data, 40, 0.1)
        monkeypatch.setattr(bodies, "PAUSE_S", 0.3)
        monkeypatch.setattr(bodies, "BYTES_PER_S_MIN", 100)
        assert b"408 Request Timeout" in send_slowly(server, data, 1, 0.05)
        assert b"408 Request Timeout" in send_slowly(server, data, 40, 0.6)
        assert server.context.body_bytes.amount == 0


def send_slowly(server: EdgeServer, data: bytes, part: int, pause_s: float) -> bytes:
    """The answer to a body that comes in parts, with a pause before each."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        connection.sendall(head.encode() + b"\r\n\r\n")
        connection.settimeout(pause_s)
        for start in range(0, len(data), part):
            try:
                return connection.recv(1000)
            except TimeoutError:
                connection.sendall(data[start : start + part])
        connection.settimeout(60)
        return connection.recv(1000)


def raw(server: EdgeServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(10_000), b""))


def test_counting_a_large_body_lets_others_in() -> None:
    async def turns() -> int:
        count = 0

        async def watch() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await bodies._count(Values(10**9), b"1," * 2**22)
        watching.cancel()
        return count

    assert asyncio.run(turns()) > 100
