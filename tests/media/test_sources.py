"""Tests of what an image's address may lead to."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vnext.media import sources
from vnext.media.pictures import BYTES_MAX, MediaError
from vnext.media.sources import MediaRules, bytes_at, is_public

WEB, HASTE = MediaRules(domains=("*",), timeout_s=60.0), MediaRules(domains=("*",), timeout_s=0.5)


class Answers(BaseHTTPRequestHandler):
    """A server that redirects, trickles and sends too much."""

    def do_GET(self) -> None:
        match self.path.split("/")[1:]:
            case ["to", *rest]:
                self.send_response(302)
                self.send_header("Location", "/".join(rest))
                self.end_headers()
            case ["round"]:
                self.send_response(302)
                self.send_header("Location", "/round")
                self.end_headers()
            case ["slow"]:
                self.send_response(200)
                self.end_headers()
                for _ in range(30):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            case ["large"]:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(bytes(BYTES_MAX + 1))
            case ["cut"]:
                self.send_response(200)
                self.send_header("Content-Length", "5")
                self.end_headers()
                self.wfile.write(b"good")
            case ["good"]:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"good")
            case _:
                self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server here, which counts as one of the web; each other private address does not."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(sources, "is_public", lambda address: address == "127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_data_urls() -> None:
    assert bytes_at("data:image/png;base64," + base64.b64encode(b"abc").decode(), MediaRules(), "it") == b"abc"
    assert bytes_at("data:image/png;base64," + base64.encodebytes(bytes(90)).decode(), MediaRules(), "it") == bytes(90), "in lines"
    for address in ("data:image/png,abc", "data:image/png;base64", "data:;base64,a", "data:;base64,\u00e9"):
        with pytest.raises(MediaError, match="^it is no (data URL|base64)"):
            bytes_at(address, MediaRules(), "it")
    with pytest.raises(MediaError, match="it may have"):
        bytes_at("data:;base64," + "A" * (BYTES_MAX * 4 // 3 + 8), MediaRules(), "it")


def test_files_lie_below_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.write_bytes(b"secret")
    (inside / "a b").write_bytes(b"abc")
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to("loop")
    os.mkfifo(inside / "pipe")
    rules = MediaRules(str(inside))
    for beginning in ("file://", "FILE://LocalHost", "file:"):
        assert bytes_at(f"{beginning}{inside}/a%20b", rules, "it") == b"abc"
    below = [f"{inside}/{path}" for path in ("../out", "%2e%2e/out", "link", "loop", "loop/a", "pipe", "%00", "%ff", "\ud800", "a" * 300)]
    for path in (*below, outside, inside, "/no/such", "a\0b", "//else/a", "[", "\u2100/a", "/dev/zero"):
        with pytest.raises(MediaError, match="^it is no file below the folder that may be read$"):
            bytes_at(f"file://{path}", rules, "it")
    with pytest.raises(MediaError, match="a file here, which is not read: send it as a data URL"):
        bytes_at(f"file://{inside}/a%20b", MediaRules(), "it")


def test_the_web_is_closed_unless_opened() -> None:
    with pytest.raises(MediaError, match="which this server does not read: send it as a data URL"):
        bytes_at("https://example.org/a.png", MediaRules(), "it")
    with pytest.raises(MediaError, match="begins with data:, file: or https:"):
        bytes_at("ftp://example.org/a.png", WEB, "it")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "::",
        "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "ff02::1", "255.255.255.255", "198.18.0.1",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, ("1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1")))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_no_spelling_leads_to_this_machine(host: str) -> None:
    with pytest.raises(MediaError, match="^it (leads to a private address|could not be fetched)"):
        bytes_at(f"http://{host}:9/", WEB, "it")


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, web: str) -> None:
    """A name server that answers otherwise the second time leads nowhere."""
    answers, real, port = ["127.0.0.1", "10.0.0.1"], socket.getaddrinfo, int(web.rpartition(":")[2])

    def lookup(host: str, *args: object, **more: object) -> list:
        return real(answers.pop(0) if host == "turns.example" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert bytes_at(f"http://turns.example:{port}/good", WEB._replace(domains=("Turns.Example",)), "it") == b"good"
    with pytest.raises(MediaError, match="private address"):
        bytes_at(f"http://turns.example:{port}/good", WEB, "it")


def test_a_name_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_end.wait(60) and [])
    began_s = time.monotonic()
    with pytest.raises(MediaError, match="^it could not be fetched: TimeoutError$"):
        bytes_at("http://silent.example/a", HASTE, "it")
    assert time.monotonic() - began_s < 30
    may_end.set()


def test_other_domains_stay_closed(web: str) -> None:
    """A redirect is no way around."""
    port = web.rpartition(":")[2]
    here, there = MediaRules(domains=("127.0.0.1", "b.example")), MediaRules(domains=("a.example", "b.example"))
    assert bytes_at(f"{web}/good", here, "it") == b"good"
    for address, rules, host in (
        (f"{web}/good", there, "127.0.0.1"), (f"{web}/to/http://localhost:{port}/good", here, "localhost"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=f"^it leads to {host}, and this server reads {', '.join(rules.domains)}$"):
            bytes_at(address, rules, "it")


def test_bounds_of_the_web(web: str) -> None:
    assert bytes_at(f"{web}/good", WEB, "it") == b"good"
    assert bytes_at(f"{web}/to/{web}/good", WEB, "it") == b"good"
    for path, words in (
        ("round", "redirected more than 3 times"), ("slow", "could not be fetched: TimeoutError"), ("large", "more than 20971520 bytes"),
        ("cut", "could not be fetched: IncompleteRead"),
        ("none", "its server answers 404"), ("to/http://10.0.0.1/a", "private address"), ("to/file:///etc/passwd", "no address of the web"),
        ("to/http://[/", "could not be fetched"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=f"^it.*{words}"):
            bytes_at(f"{web}/{path}", HASTE if path == "slow" else WEB, "it")
