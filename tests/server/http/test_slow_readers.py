"""A client that does not read its stream: what it costs, and how it ends."""

from __future__ import annotations

import gc
import json
import logging
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from edge_server import EdgeServer, echo_answer
from fake_engine import CONFIG, FakeEngine, wait_until
from msgspec.structs import replace

from vnext.server.http import connections
from vnext.server.http.connections import PROGRESS_BYTES, Connections
from vnext.server.settings import ServerSettings

STREAMS, LENGTH = 4, 2_000
STREAM_BYTES_MAX = 128 * 2**10  # the transport's limit, 32 frames and the stream's own objects
TOKEN_BYTES_MAX = 5  # a growing array holds a little more than 4


@contextmanager
def unread(server: EdgeServer, length: int) -> Iterator[socket.socket]:
    """A connection with a stream that nobody reads, with small buffers in the kernel."""
    body = json.dumps({"prompt": "xyz", "max_tokens": length, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nX-Request-Id: unread\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        yield connection


def small_buffers(server: EdgeServer) -> None:
    for listener in server.site._server.sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def traced_bytes() -> int:
    """What this process holds, without what the fake engine and the test hold."""
    gc.collect()
    ours = [tracemalloc.Filter(False, f"*{name}*") for name in ("fake_engine", "edge_server", "test_slow_readers", "tracemalloc")]
    return sum(each.size for each in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


def test_an_unread_stream_costs_a_fixed_amount_and_four_bytes_a_token() -> None:
    engine = FakeEngine(echo_answer, config=replace(CONFIG, max_model_len=2**16, page_count=2**12))
    with EdgeServer(engine=engine) as server, ExitStack() as stack:
        small_buffers(server)
        server.post("/v1/completions", {"prompt": "say:a", "stream": True})
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        before = traced_bytes()
        engine.running.clear()
        for _ in range(STREAMS):
            stack.enter_context(unread(server, LENGTH))
        wait_until(lambda: len(engine._live) == STREAMS)
        engine.running.set()
        wait_until(lambda: not engine._live and server.context.client.live_count == 0)
        assert (traced_bytes() - before) / STREAMS < STREAM_BYTES_MAX + TOKEN_BYTES_MAX * LENGTH
        assert server.context.limiter.live_count == STREAMS  # paused, not gone


def test_an_unread_stream_is_ended_with_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.05)
    engine = FakeEngine(echo_answer, config=replace(CONFIG, max_model_len=2**16, page_count=2**12))
    with EdgeServer(engine=engine, write_timeout_s=0.3) as server, caplog.at_level(logging.WARNING):
        small_buffers(server)
        with unread(server, LENGTH):
            wait_until(lambda: "vnext_connections_closed_total" in server.get("/metrics")[1])
            wait_until(lambda: server.context.limiter.live_count == 0 == server.context.client.live_count)
        [line] = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("vnext_connections_closed_total")]
        assert 'reason="slow_reader"' in line and line.endswith(" 1.0")
    assert "closed the connection of unread: its client read less than 4096 of the" in caplog.text


class Transport:
    pending = 0
    is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.pending

    def abort(self) -> None:
        self.is_closed = True


class Connection:
    peername = ("127.0.0.1", 1)

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def force_close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("reads", "is_closed"), [(0, True), (10, True), (PROGRESS_BYTES // 2 - 100, True), (PROGRESS_BYTES // 2, False)]
)
def test_a_client_that_takes_a_few_bytes_now_and_then_gets_no_more_time(reads: int, is_closed: bool) -> None:
    transport = Transport()
    connection = Connection(transport)
    watched = Connections(ServerSettings(write_timeout_s=60.0))
    transport.pending = 2**16
    watched.busy(connection)
    for second in range(600):
        watched.look([connection], 10**6 + second)
        transport.pending -= reads if second % 29 == 28 else 0
    assert transport.is_closed == is_closed
