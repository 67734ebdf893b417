"""Connections that do nothing, or too little, are closed; what is in work goes on."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import ssl
from asyncio import selector_events, sslproto
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.server.http import connections
from vnext.server.http.connections import FILES_BESIDE, READ_BYTES, Connections, Runner, room_for
from vnext.server.settings import ServerSettings
from vnext.server.tls import tls_context

PEM = str(Path(__file__).parents[1] / "localhost.pem")
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"prompt": "a", "stream": True, "max_tokens": 400}).encode()
STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.05)


@contextmanager
def connected(server: EdgeServer, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        yield connection


def ended(connection: socket.socket) -> bool:
    """Whether the server ends it before long."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def is_well(server: EdgeServer) -> bool:
    """Whether it answers, or ends this connection too because its request came late."""
    with suppress(OSError):
        return server.get("/health")[0] == 200
    return False


def still_serves(connection: socket.socket) -> bool:
    connection.sendall(REQUEST)
    return b"200 OK" in connection.recv(65536)


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET /%b HTTP/1.1\r\nHost: a" % (b"a" * 8_191), 414, "address is longer than 8 KiB"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nCookie: %b" % (b"a" * 9_000), 431, "A header of the request is longer than 8 KiB"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n%b: a" % (b"a" * 8_191), 431, "A header of the request is longer than 8 KiB"),
        (b"GET / HTTP/1.1\r\nHost: a%b" % (b"\r\nA: a" * 128), 431, "more than 128 headers"),
        (b"GET / HTTP/1.1\r\nA: a", 400, "no valid HTTP/1.1: missing 'Host' header in request."),
        (b"HELLO", 400, "no valid HTTP/1.1: invalid method encountered."),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1", 400, "invalid character in Content-Length."),
    ],
)  # fmt: skip
def test_a_head_that_is_none_gets_an_error_object(server: EdgeServer, head: bytes, status: int, words: str) -> None:
    with connected(server, head + b"\r\n\r\n") as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    line, _, rest = answer.partition(b"\r\n")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert line.split()[1] == b"%d" % status and words in error["message"] and error["code"] and b"json" in rest


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_request_that_is_not_begun_or_not_ended_is_not_waited_for(sent: bytes) -> None:
    with EdgeServer(head_timeout_s=0.3) as server, connected(server, sent) as connection:
        assert ended(connection)
        wait_until(lambda: is_well(server))


def test_a_head_that_comes_byte_by_byte_gets_no_more_time() -> None:
    with EdgeServer(head_timeout_s=0.5) as server, connected(server, b"GET /health HTTP/1.1\r\nX: ") as connection:
        with pytest.raises(OSError):
            connection.settimeout(0.02)
            for _ in range(500):
                connection.sendall(b"x")
                try:
                    assert connection.recv(100) == b""
                    raise ConnectionResetError("it was closed")
                except TimeoutError:
                    continue


def test_a_kept_connection_goes_after_a_while_and_one_with_an_answer_in_progress_does_not() -> None:
    with EdgeServer(keepalive_timeout_s=0.4) as server, connected(server, REQUEST) as idle:
        server.engine.running.clear()
        with connected(server, STREAM) as busy:
            assert ended(idle)
            wait_until(lambda: len(server.runner.server.connections) == 1)
            server.engine.running.set()
            assert b"text/event-stream" in busy.recv(65536)


def test_a_client_that_takes_nothing_of_its_stream_is_cut_off() -> None:
    with EdgeServer(write_timeout_s=0.3) as server, connected(server, REQUEST) as connection:
        connection.recv(1000)
        [handler] = server.runner.server.connections
        assert server.in_loop(_write(handler.transport, b"x" * 2**24)) > 2**20
        wait_until(lambda: not server.runner.server.connections)


async def _write(transport: asyncio.Transport, data: bytes) -> int:
    """How much of it waits."""
    transport.write(data)
    return transport.get_write_buffer_size()


def test_too_many_go_by_how_long_they_have_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.server.context.admission.SHARE_MIN", 1)
    with EdgeServer(connections_max=16) as server, ExitStack() as stack:
        server.engine.running.clear()
        busy = stack.enter_context(connected(server, STREAM))
        wait_until(lambda: server.context.client.live_count == 1)
        idle = [stack.enter_context(connected(server)) for _ in range(40)]
        wait_until(lambda: 0 < len(server.runner.server.connections) <= 12)  # all are one client's
        server.engine.running.set()
        assert b"text/event-stream" in busy.recv(65536)
        assert still_serves(idle[-1]) and ended(idle[0])


def test_those_in_work_go_last_and_the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.server.context.admission.SHARE_MIN", 1)
    with EdgeServer(connections_max=4) as server, ExitStack() as stack:
        server.engine.running.clear()
        working = []
        for count in range(1, 6):
            working.append(stack.enter_context(connected(server, STREAM)))
            wait_until(lambda least=count: len(server.engine.received) > least)
        wait_until(lambda: len(server.runner.server.connections) == 3)
        server.engine.running.set()
        assert b"text/event-stream" in working[0].recv(65536) and ended(working[-1])


def test_a_connection_that_is_kept_serves_many_requests() -> None:
    with EdgeServer() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for _ in range(5):
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        connection.close()


@pytest.mark.parametrize(
    ("now", "most", "room", "then"),
    [
        (1024, 4096, 4096 - FILES_BESIDE, 4096),
        (1024, resource.RLIM_INFINITY, 8192, 8192 + FILES_BESIDE),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None),
        (20_000, 20_000, 8192, None),
        (100, 100, 1, 100),
    ],
)
def test_no_more_connections_than_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch, now: int, most: int, room: int, then: int | None
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert room_for(8192) == room
    assert asked == ([] if then is None else [(then, most)])


def test_many_are_closed_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CLOSED_AT_ONCE_MAX", 5)
    with EdgeServer(head_timeout_s=0.3) as server, ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(12)]
        assert all(map(ended, idle))


@pytest.mark.parametrize("expectation", [b"\xa0p\xff", b"200-maybe", b"100-continue, x", b"100-Continue", b""])
@pytest.mark.parametrize(("line", "status"), [(b"POST /v1/completions", b"200"), (b"POST /nowhere", b"404"), (b"POST /version", b"405")])
def test_an_expectation_that_is_not_known_is_passed_over(expectation: bytes, line: bytes, status: bytes) -> None:
    """Its bytes reach aiohttp before any view, check or middleware."""
    body = b'{"prompt": "say:a"}'
    head = line + b" HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nConnection: close\r\nExpect: " + expectation
    with EdgeServer() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(interim) == (expectation.lower() == b"100-continue")
    assert answer.removeprefix(interim)[9:12] == status and b"Content-Type: application/json" in answer


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_turn_reads_and_parses_few_bytes_of_a_connection(is_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a byte cost microseconds each."""
    for transport in (selector_events._SelectorTransport, sslproto.SSLProtocol):
        monkeypatch.setattr(transport, "max_size", 2**18)  # as asyncio has it
    sizes: list[int] = []

    class Noting(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

    async def run() -> None:
        runner = Runner(web.Application(), Connections(ServerSettings()))
        await runner.setup()
        contexts = (tls_context(ServerSettings(ssl_certfile=PEM)), ssl.create_default_context(cafile=PEM)) if is_tls else (None, None)
        server = await asyncio.get_running_loop().create_server(Noting, "127.0.0.1", 0, ssl=contexts[0])
        named = {"server_hostname": "localhost"} if is_tls else {}
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=contexts[1], **named)
        writer.write(bytes(2**20))
        while sum(sizes) < 2**20:
            await asyncio.sleep(0.001)
        writer.close()
        server.close()
        await runner.cleanup()

    asyncio.run(run())
    assert max(sizes) <= READ_BYTES and len(sizes) >= 2**20 // READ_BYTES
