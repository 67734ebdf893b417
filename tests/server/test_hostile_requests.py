"""A sample of the hostile requests that scripts/fuzz_http.py sends by the hundred thousand: each gets an answer that is in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest
from edge_server import EdgeServer

ROOT = Path(__file__).resolve().parents[2]
SEEDS = [*range(400), 1568]
"""1568: an old client asks to keep a connection whose end is the only end of its stream."""
VECTORS = (b"/v1/embeddings", b"/api/embed", b"/api/embeddings", b"/rerank", b"/score")
"""The server of these tests has no model that computes them."""


@pytest.fixture
def fuzz_http(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import fuzz_http

    return fuzz_http


def test_hostile_requests_get_answers_that_are_in_order(fuzz_http: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    faults = {}

    async def work(port: int, seeds: list[int]) -> None:
        for seed in seeds:
            sent = fuzz_http.case(seed)
            if sent.data.split()[1] in VECTORS:
                continue
            if fault := fuzz_http.fault_of(sent, await fuzz_http.send(port, sent, 30.0)):
                faults[seed] = fault

    async def all_of_them(port: int) -> None:
        await asyncio.gather(*(work(port, SEEDS[first::8]) for first in range(8)))

    with EdgeServer() as server:
        asyncio.run(all_of_them(server.port))
        assert faults == {} and caplog.text == ""
        assert server.post("/v1/completions", {"prompt": "say:fine"})[1]["choices"][0]["text"] == "fine"


def test_a_case_is_a_function_of_its_seed(fuzz_http: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [fuzz_http.case(seed) for seed in range(200)]
    with monkeypatch.context() as later:
        later.setattr("time.time", lambda: 10**9)
        assert [fuzz_http.case(seed) for seed in range(200)] == first
    assert len({fuzz_http.case(seed).data for seed in range(200)}) > 190


@pytest.mark.parametrize(
    ("status", "headers", "body", "words"),
    [
        (0, {}, b"", "no answer"),
        (500, {}, b"", "status 500"),
        (400, {}, b"Bad Request", "without an error object"),
        (400, {"x-request-id": "a"}, b'{"error": {"message": "", "type": "t"}}', "odd error"),
        (400, {}, b'{"error": {"message": "a whole sentence", "type": "t"}}', "odd error"),
        (400, {"x-request-id": "a"}, b'{"error": "a whole sentence"}', "odd error"),
        (200, {"content-type": "application/x-ndjson"}, b'{"done":false}\n', "a stream of lines ends with"),
        (200, {"content-type": "application/x-ndjson"}, b'{"done":false}\n{"done":true}\n', ""),
        (200, {"content-type": "application/json"}, b'{"id":', "no JSON"),
        (200, {"content-type": "text/event-stream"}, b'data: {"id": 1}\n\n', "a stream ends with"),
        (200, {"content-type": "text/event-stream"}, b'data: {"id": 1}\n\ndata: [DONE]\n\n', ""),
        (200, {"content-type": "text/event-stream"}, b'data: {"error": 1}\n\n', ""),
        (400, {"x-request-id": "a"}, b'{"error": {"message": "a whole sentence", "type": "t"}}', ""),
    ],
)
def test_the_judge_sees_what_is_wrong(fuzz_http: ModuleType, status: int, headers: dict[str, str], body: bytes, words: str) -> None:
    sent = fuzz_http.Case(0, [b"POST / HTTP/1.1\r\n\r\n"], "", True)
    found = fuzz_http.fault_of(sent, fuzz_http.Response(status, headers, body, True))
    assert words in found and bool(words) == bool(found)
