"""Web pages of other sites: a browser sends what they ask for, and a server without a key must not do it."""

from __future__ import annotations

import socket

import pytest
from edge_server import EdgeServer

PROMPT = {"prompt": "say:hi"}


def ask(server: EdgeServer, **headers: str) -> int:
    status, answer, _ = server.post("/v1/completions", PROMPT, **{name.replace("_", "-"): word for name, word in headers.items()})
    assert status == 200 or answer["error"]["code"] == "origin_rejected" and "--allowed-origins" in answer["error"]["message"]
    return status


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "127.0.0.1:{port}"),
        ("null", "127.0.0.1:{port}"),
        ("http://127.0.0.1.evil.example", "127.0.0.1:{port}"),
        ("http://localhost@evil.example", "127.0.0.1:{port}"),
        ("http://[", "127.0.0.1:{port}"),
        ("http://evil.example:{port}", "evil.example:{port}"),  # its name points here: DNS rebinding
        ("http://10.0.0.2:{port}", "10.0.0.1:{port}"),
        ("https://chat.example", "10.0.0.1:{port}"),
    ],
)
def test_a_page_of_another_site_is_refused(server: EdgeServer, origin: str, host: str) -> None:
    assert ask(server, Origin=origin.format(port=server.port), Host=host.format(port=server.port)) == 403
    assert ask(server) == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_is_refused_without_an_origin_too(server: EdgeServer, site: str) -> None:
    assert server.get("/v1/models", **{"Sec-Fetch-Site": site})[0] == 403
    assert server.get("/v1/models", **{"Sec-Fetch-Site": "same-origin", "Host": "evil.example"})[0] == 403
    assert server.get("/v1/models", **{"Sec-Fetch-Site": "none", "Host": "box.example"})[0] == 200
    assert server.get("/health", **{"Sec-Fetch-Site": site})[0] == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:{port}", "127.0.0.1:{port}"),
        ("http://localhost:3000", "localhost:{port}"),
        ("http://[::1]:3000", "[::1]:{port}"),
        ("http://10.0.0.1:{port}", "10.0.0.1:{port}"),
        (f"http://{socket.gethostname()}:{{port}}", f"{socket.gethostname()}:{{port}}"),
    ],
)
def test_a_page_of_this_server_and_one_of_this_machine_pass(server: EdgeServer, origin: str, host: str) -> None:
    assert ask(server, Origin=origin.format(port=server.port), Host=host.format(port=server.port)) == 200


def test_allowed_origins_pass_and_a_key_needs_no_check() -> None:
    with EdgeServer(allowed_origins=("https://chat.example",)) as server:
        assert ask(server, Origin="https://chat.example") == 200
        assert ask(server, Origin="https://chat.example.evil.example") == 403
    with EdgeServer(allowed_origins=("*",)) as server:
        assert ask(server, Origin="https://any.example") == 200
    with EdgeServer(api_keys=("secret",)) as server:
        assert ask(server, Origin="https://any.example", Authorization="Bearer secret") == 200
