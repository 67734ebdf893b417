"""Uploads of files: while one comes as fast as it can, others have their turns."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edge_server import EdgeServer

from vnext.server.views import batches

PIECES, PIECE = 200, bytes(2**16)
REQUEST = SimpleNamespace(headers={"Content-Type": "multipart/form-data; boundary=x"})
FILE, OTHER = (b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name for name in (b"file", b"other"))


def send(monkeypatch: pytest.MonkeyPatch, *pieces: bytes) -> None:
    """The body is here already: reading it never waits."""

    async def body_pieces(*_: object) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    monkeypatch.setattr(batches, "body_pieces", body_pieces)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EdgeServer]:
    with EdgeServer(batch_dir=str(tmp_path)) as running:
        yield running


def turns_during(work: Any) -> int:
    """The turns that another task has until `work` has ended."""

    async def run() -> int:
        count, working = 0, asyncio.ensure_future(work)
        while not working.done():
            count += 1
            await asyncio.sleep(0)
        working.result()
        return count

    return asyncio.run(run())


def test_others_have_a_turn_after_each_piece_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch, FILE, *[PIECE] * PIECES, b"\r\n--x--")
    assert turns_during(batches._parts(REQUEST, tmp_path / "draft")) >= PIECES
    assert (tmp_path / "draft").stat().st_size == PIECES * len(PIECE)


@pytest.mark.parametrize("before", [b"", OTHER])
def test_others_have_a_turn_after_each_piece_that_nobody_wants(before: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch, before, *[b"\n" * len(PIECE)] * PIECES, b"\r\n--x--")
    assert turns_during(batches._parts(REQUEST, tmp_path / "draft")) >= PIECES


def test_a_body_is_bounded_as_a_file_is(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FILE_BYTES_MAX", 10)
    sent = {"Content-Type": "multipart/form-data; boundary=x"}
    for body, status in ((FILE + bytes(11), 413), (OTHER + bytes(2**20), 413), (OTHER + bytes(2**19), 400)):
        assert server.post("/v1/files", body + b"\r\n--x--", **sent)[0] == status


def test_a_packed_file_is_unpacked(server: EdgeServer) -> None:
    body = OTHER.replace(b"other", b"purpose") + b"batch\r\n" + FILE + b"{}\r\n--x--"
    sent = {"Content-Type": "multipart/form-data; boundary=x", "Content-Encoding": "gzip"}
    assert server.post("/v1/files", gzip.compress(body), **sent)[1]["bytes"] == 2


def test_the_loop_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow stops only the upload."""
    wrote: set[threading.Thread] = set()

    class File:
        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: bytes) -> None:
            wrote.add(threading.current_thread())

    monkeypatch.setattr(batches, "open", lambda *_, **__: File(), raising=False)
    send(monkeypatch, FILE, PIECE, PIECE, b"\r\n--x--")
    asyncio.run(batches._parts(REQUEST, tmp_path / "draft"))
    assert wrote and threading.current_thread() not in wrote
