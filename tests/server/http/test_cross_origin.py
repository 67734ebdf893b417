"""Cross-origin requests, as a browser makes them: the preflight, and the headers without which it keeps an answer to itself."""

from __future__ import annotations

from typing import Any

import pytest
from edge_server import EdgeServer

PAGE = "https://chat.example"
PROMPT = {"prompt": "say:hi"}


def preflight(server: EdgeServer, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
    return server.call("OPTIONS", path, **({"Origin": PAGE, "Access_Control_Request_Method": "POST"} | headers))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/nowhere"])
def test_a_preflight_needs_no_key(path: str) -> None:
    with EdgeServer(api_keys=("secret",), allowed_origins=(PAGE,)) as server:
        status, answer, headers = preflight(server, path, Access_Control_Request_Headers="authorization,content-type")
        assert status == 204 and answer == "" and headers["Access-Control-Allow-Origin"] == PAGE
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"].split(", ") and headers["Vary"] == "Origin"
        assert server.post("/v1/completions", PROMPT, Origin=PAGE)[0] == 401, "the request itself needs it"


@pytest.mark.parametrize("stream", [False, True])
def test_an_allowed_page_may_read_its_answer_and_any_error(stream: bool) -> None:
    with EdgeServer(api_keys=("secret",), allowed_origins=(PAGE, "http://other.example")) as server:
        good = server.post("/v1/completions", PROMPT | {"stream": stream}, Origin=PAGE, Authorization="Bearer secret")
        bad = server.post("/v1/completions", {}, Origin=PAGE, Authorization="Bearer secret")
        refused = server.post("/v1/completions", PROMPT, Origin=PAGE)
        assert (good[0], bad[0], refused[0]) == (200, 400, 401)
        for _, _, headers in (good, bad, refused, server.get("/nowhere", Origin=PAGE)):
            assert headers["Access-Control-Allow-Origin"] == PAGE and headers["Vary"] == "Origin"
            assert headers["Access-Control-Expose-Headers"] == "X-Request-Id, Request-Id"
            assert headers["Access-Control-Allow-Credentials"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_with_a_key_refuses_no_page(stream: bool) -> None:
    """A foreign page does not know the key."""
    with EdgeServer(api_keys=("secret",)) as server:
        status, _, headers = preflight(server, Access_Control_Request_Headers="authorization,content-type")
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, "*")
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for key, expected in (("secret", 200), ("wrong", 401)):
            status, _, headers = server.post("/v1/completions", PROMPT | {"stream": stream}, Origin=PAGE, Authorization=f"Bearer {key}")
            assert (status, headers["Access-Control-Allow-Origin"]) == (expected, "*")
            assert headers["Access-Control-Allow-Credentials"] is None
        for path in ("/metrics", "/health", "/"):
            assert server.get(path, Origin=PAGE)[2]["Access-Control-Allow-Origin"] is None, "they need no key"


def test_another_page_is_told_nothing() -> None:
    with EdgeServer(api_keys=("secret",), allowed_origins=(PAGE,)) as server:
        status, answer, headers = preflight(server, Origin=PAGE + ".evil.example")
        assert status == 403 and "--allowed-origins" in answer["error"]["message"]
        assert headers["Access-Control-Allow-Origin"] is None
        _, _, headers = server.get("/v1/models", Origin="https://evil.example", Authorization="Bearer secret")
        assert headers["Access-Control-Allow-Origin"] is None and headers["Vary"] == "Origin"
        assert server.get("/v1/models", Authorization="Bearer secret")[2]["Access-Control-Allow-Origin"] is None


def test_without_allowed_origins_nothing_changes(server: EdgeServer) -> None:
    assert preflight(server)[0] == 403
    _, _, headers = server.get("/health", Origin=PAGE)
    assert headers["Access-Control-Allow-Origin"] is None and headers["Vary"] is None
    assert server.call("OPTIONS", "/v1/completions")[0] == 405, "no preflight"


def test_any_page() -> None:
    with EdgeServer(allowed_origins=("*",)) as server:
        assert preflight(server)[2]["Access-Control-Allow-Origin"] == "*"
        _, _, headers = server.post("/v1/completions", PROMPT, Origin=PAGE)
        assert headers["Access-Control-Allow-Origin"] == "*" and headers["Vary"] is None
    with EdgeServer(allowed_origins=("*",), allow_credentials=True) as server:
        _, _, headers = server.post("/v1/completions", PROMPT, Origin=PAGE)
        assert headers["Access-Control-Allow-Origin"] == PAGE and headers["Access-Control-Allow-Credentials"] == "true"
        assert headers["Vary"] == "Origin", "no browser sends cookies to a server that allows any page by a star"


def test_methods_and_headers_may_be_narrowed() -> None:
    with EdgeServer(allowed_origins=(PAGE,), allowed_methods=("POST",), allowed_headers=("content-type", "x-a")) as server:
        headers = preflight(server, Access_Control_Request_Headers="authorization")[2]
        assert headers["Access-Control-Allow-Methods"] == "POST" and headers["Access-Control-Allow-Headers"] == "content-type, x-a"
