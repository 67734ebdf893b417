"""The log over HTTP: byte for byte what the engine wrote, in bounded parts, to those who may see it, and in plain
words to others."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from aiohttp import ClientConnectionResetError, web
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.log.codec import segment_name
from vnext.replay.reading.mirror import Lost, Mirror, Silent
from vnext.replay.reading.source import UnusableLog
from vnext.server.views import log_view
from vnext.server.views.log_view import READERS, READERS_MAX

CHANCE = random.Random(3)


def write(folder: Path, *sizes: int) -> list[bytes]:
    """Segments of these sizes: whatever is in them, it is copied."""
    folder.mkdir(exist_ok=True)
    written = [CHANCE.randbytes(size) for size in sizes]
    for number, data in enumerate(written):
        (folder / segment_name(number)).write_bytes(data)
    return written


def copied(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}


def pull_all(mirror: Mirror) -> None:
    while mirror.pull():
        pass


def test_a_mirror_has_the_bytes_of_the_log_from_its_newest_segment_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log_view, "PART_BYTES_MAX", 1000)
    log, copy = tmp_path / "log", tmp_path / "copy"
    copy.mkdir()
    written = write(log, 300, 4321)
    with EdgeServer(log_dir=str(log)) as server:
        mirror = Mirror(server.url, "", copy)
        pull_all(mirror)
        assert mirror.name == "log" and copied(copy) == {segment_name(1): written[1]}
        for number in range(1, 8):
            with (log / segment_name(number)).open("ab") as file:
                file.write(CHANCE.randbytes(2500))
            (log / segment_name(number + 1)).write_bytes(CHANCE.randbytes(17))
            pull_all(mirror)
        assert copied(copy) == {name: data for name, data in copied(log).items() if name >= segment_name(5)}
        for number in range(8, 10):  # faster than it is read
            (log / segment_name(number)).unlink(missing_ok=True)
        (log / segment_name(10)).write_bytes(b"later")
        with pytest.raises(Lost, match="has deleted what comes next"):
            mirror.pull()
        mirror.close()
    with pytest.raises(Silent, match="nobody answers"):
        mirror.pull()


def test_only_those_who_may_see_the_log(tmp_path):
    write(tmp_path / "log", 10)
    with EdgeServer() as server:
        with pytest.raises(UnusableLog, match="403: This server does not show its log: start it with --show-log"):
            Mirror(server.url, "", tmp_path)
    with EdgeServer(log_dir=str(tmp_path / "log")) as server:
        assert server.get("/log")[1] == {"log": "log", "segments": [[0, 10]], "part": log_view.PART_BYTES_MAX}
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example:80"):
            status, answer, _ = server.get("/log/0", Host=host)
            assert status == 403 and "--api-key" in answer["error"]["message"]
    with EdgeServer(log_dir=str(tmp_path / "log"), api_keys=("secret",)) as server:
        with pytest.raises(UnusableLog, match="asks for its API key"):
            Mirror(server.url, "", tmp_path)
        assert server.get("/log/0")[0] == 401
        status, _, _ = server.get("/log", Host="elsewhere.example", Authorization="Bearer secret")
        assert status == 200
        Mirror(server.url, "secret", tmp_path).close()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/log/1", 410), ("/log/0?offset=-1", 400), ("/log/0?offset=x", 400), ("/log/..%2f0", 404), ("/log/0?offset=99", 200)],
)
def test_what_is_not_there(tmp_path, path, status):
    write(tmp_path / "log", 10)
    with EdgeServer(log_dir=str(tmp_path / "log")) as server:
        assert server.get(path)[0] == status


def test_a_slow_viewer_is_cut_off_and_viewers_are_counted(tmp_path, monkeypatch):
    """It asks for far more than the system's buffers hold and reads nothing."""
    monkeypatch.setattr(log_view, "PART_BYTES_MAX", 1 << 26)
    monkeypatch.setattr(log_view, "WRITE_TIMEOUT_S", 0.2)
    write(tmp_path / "log", 10)
    with (tmp_path / "log" / segment_name(0)).open("ab") as file:
        file.truncate(1 << 26)
    with EdgeServer(log_dir=str(tmp_path / "log")) as server:
        readers = server.app[READERS]
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as viewer:
            viewer.sendall(b"GET /log/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: readers.count == 1)
            wait_until(lambda: readers.count == 0)
            received = 0
            with pytest.raises(ConnectionResetError):
                while part := viewer.recv(1 << 20):
                    received += len(part)
                raise ConnectionResetError("it was closed")
            assert received < 1 << 26
        readers.count = READERS_MAX
        with pytest.raises(UnusableLog, match=f"429: {READERS_MAX} viewers read the log"):
            Mirror(server.url, "", tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "nobody answers at http://127.0.0.1:9"),
        ("ftp://127.0.0.1", "is no address of a server"),
        ("http://", "is no address of a server"),
        ("http://127.0.0.1:99999", "is no address of a server"),
        ("http://127.0.0.1:80/?x", "is no address of a server"),
    ],
)
def test_no_server_is_one_sentence(tmp_path, url, words):
    with pytest.raises(UnusableLog, match=words) as raised:
        Mirror(url, "", tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>hello</html>", "is no vnext server: it answers /log with something else"),
        (404, b"nothing", "is no vnext server that can show its log"),
        (302, b"", "answers 302, which is no answer of a vnext server"),
        (500, b"\xff", "answers 500, which is no answer of a vnext server"),
    ],
)
def test_another_kind_of_server_is_one_sentence(tmp_path, status, body, words):
    with other_server(status, body) as url, pytest.raises(UnusableLog, match=words) as raised:
        Mirror(url, "secret", tmp_path)
    assert "\n" not in str(raised.value)


@contextmanager
def other_server(status: int, body: bytes) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "http://127.0.0.1:9/log")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("error", [ClientConnectionResetError("closing"), ConnectionError("lost")])
def test_a_viewer_that_left_before_its_answer_began_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    write(tmp_path / "log", 100)
    with EdgeServer(log_dir=str(tmp_path / "log")) as server, monkeypatch.context() as patched:

        async def fail(response: web.StreamResponse, request: web.Request) -> None:
            patched.undo()
            request.transport.abort()
            raise error

        patched.setattr(web.StreamResponse, "prepare", fail)
        with pytest.raises(ConnectionError):
            server.get("/log/0")
        assert server.get("/log")[0] == 200
    assert caplog.text == ""
