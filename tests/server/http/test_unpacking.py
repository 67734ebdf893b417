"""Bodies that are packed, broken or no HTTP at all: a sentence with status 4xx, and no error line of the server's own."""

from __future__ import annotations

import gzip
import json
import socket
import tracemalloc
import zlib
from functools import partial

import pytest
from edge_server import EdgeServer

from vnext.server.http.bodies import PIECE_BYTES, Unpacker

BODY = json.dumps({"prompt": "say:packed"}).encode()


def bare(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


packed_alike = partial(gzip.compress, mtime=0)  # names of cases hold no time: processes that share tests must agree on them
PACKED = {"gzip": packed_alike, "GZIP": packed_alike, "x-gzip": packed_alike, "deflate": zlib.compress, " identity ": bytes}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_unpacked(server: EdgeServer, encoding: str) -> None:
    status, answer, _ = server.post("/v1/completions", PACKED[encoding](BODY), **{"Content-Encoding": encoding})
    assert status == 200 and answer["choices"][0]["text"] == "packed"


def test_both_forms_of_deflate(server: EdgeServer) -> None:
    assert server.post("/v1/completions", bare(BODY), **{"Content-Encoding": "deflate"})[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("gzip", BODY, 400, "Content-Encoding says gzip"),
        ("gzip", b"", 400, "cut off"),
        ("gzip", packed_alike(BODY)[:-9], 400, "cut off"),
        ("gzip", packed_alike(BODY)[:9], 400, "cut off"),
        ("gzip", packed_alike(BODY) + b"more", 400, "continues after its end"),
        ("deflate", BODY, 400, "Content-Encoding says deflate"),
        ("deflate", zlib.compress(BODY)[:-4], 400, "cut off"),
        ("br", BODY, 415, "'br': send it as gzip"),
        ("zstd", BODY, 415, "'zstd'"),
        ("gzip, gzip", packed_alike(packed_alike(BODY)), 415, "'gzip, gzip'"),
        ("x" * 5000, BODY, 415, "xxx"),
    ],
)
def test_what_is_not_packed_as_it_says(
    server: EdgeServer, caplog: pytest.LogCaptureFixture, path: str, encoding: str, body: bytes, status: int, words: str
) -> None:
    found, answer, _ = server.post(path, body, **{"Content-Encoding": encoding})
    assert found == status and words in answer["error"]["message"] and len(answer["error"]["message"]) < 300
    assert answer["error"]["type"] == "invalid_request_error" and caplog.text == ""


def test_the_bound_counts_unpacked_bytes() -> None:
    packed = packed_alike(b" " * 2**20 + BODY)
    assert len(packed) < 2000
    with EdgeServer(body_bytes_max=2**20) as server:
        status, answer, _ = server.post("/v1/completions", packed, **{"Content-Encoding": "gzip"})
        assert status == 413 and answer["error"]["code"] == "too_large"
    with EdgeServer(body_bytes_max=2**20 + len(BODY)) as server:
        assert server.post("/v1/completions", packed, **{"Content-Encoding": "gzip"})[0] == 200


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES, 3 * PIECE_BYTES + 1])
def test_parts_of_any_size_give_small_pieces(size: int, length: int) -> None:
    data = bytes(range(256)) * (length // 256) + bytes(length % 256)
    packed, unpacker = packed_alike(data), Unpacker("gzip")
    found = [piece for start in range(0, len(packed), size) for piece in unpacker.pieces(packed[start : start + size])]
    unpacker.end()
    assert b"".join(found) == data and max(map(len, found)) <= PIECE_BYTES


def test_a_bomb_is_unpacked_up_to_the_bound_only() -> None:
    bomb = zlib.compress(bytes(64 * 2**20))
    tracemalloc.start()
    with EdgeServer(body_bytes_max=2**18) as small:
        assert small.post("/tokenize", bomb, **{"Content-Encoding": "deflate"})[0] == 413
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 2**20


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 5\r\n\r\n" + BODY,
        b"Content-Length: -1\r\n\r\n" + BODY,
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Expect: the unexpected\r\nContent-Length: 0\r\n\r\n",
        b"no colon\r\n\r\n",
        b"X: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_no_error_of_the_server(server: EdgeServer, caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            + sent
        )
        status = connection.recv(65536).split()[1]
    assert status.startswith(b"4") and caplog.text == ""
    assert server.post("/v1/completions", {"prompt": "say:fine"})[1]["choices"][0]["text"] == "fine"


def test_a_client_that_leaves_within_its_body(server: EdgeServer, caplog: pytest.LogCaptureFixture) -> None:
    for head in (b"Content-Length: 500\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head)
    assert server.get("/health")[0] == 200 and caplog.text == ""
