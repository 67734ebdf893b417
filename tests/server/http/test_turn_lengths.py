"""How much is done in one turn of the event loop: requests begun, bytes read from the engine, numbers written, files freed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.runtime.client.connection import BYTES_A_TURN, MESSAGES_A_TURN, Connection
from vnext.server.answers.writing import ChunkWriter
from vnext.server.http.middleware import STARTS_A_TURN, Starts
from vnext.server.http.streaming import unhurried
from vnext.server.views.embeddings import NUMBERS_A_TURN, written

FILE_BYTES = 2**20


class Turns:
    """Counts the turns of the loop in which it was made."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._loop.call_soon(self._next)


def test_few_requests_begin_in_a_turn_and_clients_take_turns() -> None:
    async def run() -> tuple[list[tuple[str, int]], int]:
        starts, turns, begun = Starts(), Turns(), []

        async def ask(client: str) -> None:
            await starts.turn(client)
            begun.append((client, turns.count))

        tasks = [asyncio.create_task(ask("many")) for _ in range(20 * STARTS_A_TURN)]
        await asyncio.sleep(0)
        tasks[-1].cancel()
        late = turns.count
        tasks += [asyncio.create_task(ask("one"))]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not starts._lines
        await asyncio.sleep(0)
        assert starts._left == STARTS_A_TURN
        return begun, late

    begun, late = asyncio.run(run())
    assert len(begun) == 20 * STARTS_A_TURN
    assert max(Counter(turn for _, turn in begun).values()) <= STARTS_A_TURN
    [turn] = [turn for client, turn in begun if client == "one"]
    assert turn - late <= 3, "it stands behind all of another client's"


def test_health_waits_in_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    async def turn(self: Starts, client: str) -> None:
        waited.append(client)

    monkeypatch.setattr(Starts, "turn", turn)
    with EdgeServer() as server:
        for path in ("/health", "/live", "/metrics", "/openapi.json"):
            assert server.get(path)[0] == 200
        assert not waited
        assert server.post("/v1/completions", {"prompt": "say:a"})[0] == server.get("/v1/models")[0] == 200
    assert waited == ["127.0.0.1"] * 2


@pytest.mark.parametrize(("size", "at_once"), [(8, MESSAGES_A_TURN), (BYTES_A_TURN // 2, 2), (4 * BYTES_A_TURN, 1)])
def test_a_turn_reads_few_bytes_of_the_engine(size: int, at_once: int) -> None:
    waiting = [bytes(size)] * 40
    read = Connection.__new__(Connection)
    read._socket, read._is_closed, read._reads_on = SimpleNamespace(recv=waiting.pop, get=lambda _: bool(waiting)), False, False

    async def run() -> list[int]:
        read._loop, turns, found = asyncio.get_running_loop(), Turns(), []
        read._receive = lambda data: found.append(turns.count) or True
        read._read()
        while waiting:
            await asyncio.sleep(0)
        return found

    found = asyncio.run(run())
    assert len(found) == 40 and max(Counter(found).values()) == at_once


@pytest.mark.parametrize("as_base64", [False, True])
def test_a_turn_writes_few_numbers_and_the_same_bytes(as_base64: bool) -> None:
    vectors = list(np.random.default_rng(5).standard_normal((300, 1024), np.float32))

    async def run() -> tuple[list[msgspec.Raw], int]:
        turns = Turns()
        return await written(vectors, as_base64), turns.count

    found, turns = asyncio.run(run())
    assert turns >= 300 * 1024 // NUMBERS_A_TURN
    if not as_base64:
        assert msgspec.json.encode(found) == msgspec.json.encode([each.tolist() for each in vectors])
    assert asyncio.run(written([])) == []


def test_a_turn_writes_one_answer_of_many() -> None:
    choices: list[Any] = [{"index": index, "text": "a", "logprobs": {"tokens": ["b"] * 50}} for index in range(40)]
    writer = ChunkWriter.__new__(ChunkWriter)
    writer.whole = lambda: {"id": "x", "choices": list(choices)}

    async def run() -> tuple[bytes, int]:
        turns = Turns()
        return await writer._written(), turns.count

    data, turns = asyncio.run(run())
    assert turns >= len(choices) and data == msgspec.json.encode({"id": "x", "choices": choices})


def test_work_of_many_entries_lets_others_have_a_turn() -> None:
    async def run() -> int:
        turns = Turns()
        assert [entry async for entry in unhurried(range(100), 10)] == list(range(100))
        return turns.count

    assert asyncio.run(run()) >= 10


def test_the_bytes_of_a_file_are_freed_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[tuple[int, int]] = []
    unlink = os.unlink

    def watched(path: Any, **options: Any) -> None:
        if str(tmp_path) in str(path) and os.path.isfile(path):
            freed.append((threading.get_ident(), os.path.getsize(path)))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", watched)
    with EdgeServer(batch_dir=str(tmp_path)) as server:
        loop = server.in_loop(_ident())
        for purpose, status in (("batch", 200), ("other", 400)):
            answer = httpx.post(f"{server.url}/v1/files", data={"purpose": purpose}, files={"file": ("a", bytes(FILE_BYTES))})
            assert answer.status_code == status
        [file] = server.get("/v1/files")[1]["data"]
        assert server.call("DELETE", f"/v1/files/{file['id']}")[0] == 200
        wait_until(lambda: sum(size >= FILE_BYTES for _, size in freed) == 2)
        assert server.get("/v1/files")[1]["data"] == [] and not [*(tmp_path / "files").iterdir()]
    assert max(size for thread, size in freed if thread == loop) < 2**12


async def _ident() -> int:
    return threading.get_ident()
