"""The clients of the load generator: both read the same chunks and name the same failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from load_server import load_server, sse

from tests.run.ports import held_port
from vnext.commands.bench.load.answers import Chunk, Models, RequestFailed, decode_chunk
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.bench.load.client import Client
from vnext.commands.bench.load.events import Event, EventReader, Stream

FAILURES = [
    ("refuse", "HTTP status 400", "HTTP status 400: "),
    ("fail", "error event", "The engine stopped."),
    ("cut", "cut", "without its last event"),
    ("break", "broken", "."),
    ("wait", "timeout", "."),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with load_server() as running:
        yield running


def free_url() -> str:
    return f"http://127.0.0.1:{held_port()}"


def patience_s(prompt: str) -> float:
    return 1.0 if prompt == "wait" else 60.0


def streamed(url: str, prompt: str) -> list[Chunk]:
    async def read() -> list[Chunk]:
        async with Client(url, timeout_s=patience_s(prompt)) as client:
            return [chunk async for chunk in client.stream("/v1/completions", {"prompt": prompt})]

    return asyncio.run(read())


def streamed_blocking(url: str, prompt: str) -> list[Chunk]:
    return list(BlockingClient(url, timeout_s=patience_s(prompt)).stream("/v1/completions", {"prompt": prompt}))


@pytest.mark.parametrize("read", [streamed, streamed_blocking])
def test_a_stream_is_its_chunks_with_their_times(url: str, read: Any) -> None:
    chunks = read(url, "go")
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 7]
    assert chunks[-1].usage.completion_tokens == 3 and chunks[0].text == "a" and not chunks[-1].choices
    assert 0 < chunks[0].at_s <= chunks[-1].at_s


@pytest.mark.parametrize("read", [streamed, streamed_blocking])
@pytest.mark.parametrize(("prompt", "kind", "words"), FAILURES)
def test_a_failure_has_its_kind(url: str, read: Any, prompt: str, kind: str, words: str) -> None:
    with pytest.raises(RequestFailed, match=words) as failed:
        read(url, prompt)
    assert failed.value.kind == kind and str(failed.value)


@pytest.mark.parametrize("read", [streamed, streamed_blocking])
def test_nobody_listens_there(read: Any) -> None:
    with pytest.raises(RequestFailed) as failed:
        read(free_url(), "go")
    assert (failed.value.kind, failed.value.status, failed.value.stated) == ("connect", 0, ("", ""))


def test_a_server_states_why(url: str) -> None:
    for prompt, stated in (("refuse", ("No.", "no_such_thing")), ("fail", ("The engine stopped.", ""))):
        with pytest.raises(RequestFailed) as failed:
            streamed(url, prompt)
        assert failed.value.stated == stated


def test_the_key_and_the_first_model(url: str) -> None:
    async def name(key: str) -> str:
        async with Client(url, key) as client:
            return (await client.ask("/v1/models", None, Models)).first.id

    assert asyncio.run(name("good")) == BlockingClient(url, "good").ask("/v1/models", None, Models).first.id == "m"
    with pytest.raises(RequestFailed, match="HTTP status 401"):
        asyncio.run(name("bad"))
    with pytest.raises(RequestFailed, match="HTTP status 401"):
        BlockingClient(url, "bad").read("/v1/models")


def test_token_ids_of_a_completion(url: str) -> None:
    async def ids() -> list[int]:
        async with Client(url) as client:
            return await client.token_ids({"prompt": "go"})

    assert asyncio.run(ids()) == [5, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_of_every_form_wherever_they_are_cut(size: int) -> None:
    data = b": ping\r\n\r\nid: 3\nevent: message_stop\ndata:{}\n\n:\n\ndata: one\r\ndata: two\r\n\r\nretry: 5\n\ndata: [DONE]\n\n"
    reader = EventReader()
    events = [event for at in range(0, len(data), size) for event in reader.read(data[at : at + size])]
    assert events == [Event(b"{}", b"message_stop", b"3"), Event(b"one\ntwo"), Event(b"[DONE]")]
    assert [event.is_last for event in events] == [True, False, True]


def test_a_chats_first_chunk_brings_no_token() -> None:
    """Its role alone; the seconds until then are not those to the first token."""
    def brings(choice: dict[str, Any]) -> bool:
        return decode_chunk(json.dumps({"choices": [choice]})).has_tokens

    assert not brings({"delta": {"role": "assistant", "content": ""}}) and not decode_chunk(b'{"choices": null}').has_tokens
    assert brings({"delta": {"content": "a"}}) and brings({"delta": {"tool_calls": [{}]}}) and brings({"text": ""})
    stream = Stream()
    stream.read(sse({"choices": [{"delta": {"role": "assistant"}}]}), 1.0)
    stream.read(sse({"choices": [{"delta": {"content": "a"}}]}, {"choices": [], "usage": {"completion_tokens": 1}}), 2.0)
    assert [(piece.at_s, piece.tokens) for piece in stream.pieces()] == [(2.0, 1)]
