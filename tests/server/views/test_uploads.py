"""Uploads of files: while one comes as fast as it can, others have their turns."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from vnext.server.views import batches

PIECES = 200


class Part:
    """A part of a body that is here already: reading it never waits."""

    def __init__(self) -> None:
        self.left = PIECES

    async def read_chunk(self, size: int) -> bytes:
        self.left -= 1
        return b"x" * size if self.left >= 0 else b""

    def at_eof(self) -> bool:
        return self.left <= 0


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


def test_others_have_a_turn_after_each_piece_of_a_file(tmp_path: Path) -> None:
    assert turns_during(batches._save(Part(), tmp_path / "draft")) >= PIECES
    assert (tmp_path / "draft").stat().st_size == PIECES * batches.PIECE_BYTES


def test_others_have_a_turn_after_each_piece_of_a_part_that_nobody_wants() -> None:
    assert turns_during(batches._skip(Part())) >= PIECES


def test_a_part_that_nobody_wants_is_bounded_as_a_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FILE_BYTES_MAX", 10 * batches.PIECE_BYTES)
    part = Part()
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        asyncio.run(batches._skip(part))
    assert part.left == PIECES - 11


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
    asyncio.run(batches._save(Part(), tmp_path / "draft"))
    assert wrote and threading.current_thread() not in wrote
