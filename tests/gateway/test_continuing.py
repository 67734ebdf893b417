"""A stream that another server goes on with: whatever the cuts and wherever the first one ends, the client has one whole answer.

Events are made by the API's own builders where it has some, with ids of their own for each server.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from vnext.gateway.continuing import SHOWN, Diverged, Shown, ShownResponse, split
from vnext.gateway.outgoing import WholeEvents, each_of
from vnext.server.http.streaming import event_frame, frame_of
from vnext.server.messages.blocks import MessageBuilder
from vnext.server.responses.items import ItemBuilder
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

DONE = b"data: [DONE]\n\n"
PARTS: list[Part] = [
    Reasoning("First, the \u00e4nswer \"data: x\" is thought about.\n"),
    Words("Then it is said: hello, world; data: y\n\nand so on."),
    CallBegun(0, "search", "call-1"),
    CallArguments(0, '{"query": "the sea", "count": 12}'),
    CallEnded(0),
    CallBegun(1, "look", "call-2"),
    CallArguments(1, "{}"),
    CallEnded(1),
]


def cut(rng: random.Random, parts: Iterable[Part]) -> list[Part]:
    """The same parts in other pieces."""
    pieces: list[Part] = []
    for part in parts:
        text = getattr(part, "text", None)
        if text is None:
            pieces.append(part)
            continue
        while text:
            size = rng.randrange(1, 9)
            pieces.append(CallArguments(part.index, text[:size]) if isinstance(part, CallArguments) else type(part)(text[:size]))
            text = text[size:]
    return pieces


def chunks(rng: random.Random, server: int) -> list[bytes]:
    """A chat with two choices, log-probabilities, token ids and usage."""

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "stop_reason": None} | more
        return frame_of(head | {"choices": [choice], "usage": None})

    head = {"id": f"chatcmpl-{server}", "created": server, "model": "m", "system_fingerprint": "fp"}
    streams = []
    for index in range(2):
        events = [chunk(index, {"role": "assistant", "content": ""})]
        count = 0
        for part in cut(rng, PARTS):
            match part:
                case Words():
                    ids = list(range(count, count := count + len(part.text)))
                    entries = [{"token": character, "logprob": -0.5} for character in part.text]
                    events.append(chunk(index, {"content": part.text}, logprobs={"content": entries}, token_ids=ids))
                case Reasoning():
                    events.append(chunk(index, {"reasoning": part.text, "reasoning_content": part.text}))
                case CallBegun():
                    call = {"index": part.index, "id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
                    events.append(chunk(index, {"tool_calls": [call]}))
                case CallArguments():
                    events.append(chunk(index, {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}))
        streams.append([*events, chunk(index, {}, "tool_calls")])
    mixed = []
    while any(streams):
        mixed.append(rng.choice([each for each in streams if each]).pop(0))
    return [*mixed, frame_of(head | {"choices": [], "usage": {"total_tokens": 9}}), DONE]


def message(rng: random.Random, server: int) -> list[bytes]:
    builder = MessageBuilder({"id": f"msg-of-{server}", "model": "m"})
    events = builder.begin({"input_tokens": 3})
    for part in cut(rng, PARTS):
        events += builder.part(part)
    return [event_frame(event) for event in [*events, *builder.end("tool_use", None, {"output_tokens": 9})]]


def response(rng: random.Random, server: int) -> list[bytes]:
    builder, head = ItemBuilder({}, False, f"{server}"), {"id": f"resp_{server:032x}", "created_at": server}
    events: list[dict[str, Any]] = [{"type": f"response.{name}", "response": dict(head)} for name in ("created", "in_progress")]
    for part in cut(rng, PARTS):
        events += builder.part(part)
    events += builder.complete("completed")
    events.append({"type": "response.completed", "response": head | {"output": builder.items}})
    return [event_frame(event | {"sequence_number": number}) for number, event in enumerate(events)]


STREAMS: dict[str, Callable[[random.Random, int], list[bytes]]] = {
    "/v1/chat/completions": chunks, "/v1/messages": message, "/v1/responses": response,
}  # fmt: skip


def decoded(events: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(data) for data in (split(event)[1] for event in events) if data != b"[DONE]"]


def by_order(events: bytes) -> bytes:
    """With the ids of items, which are drawn, replaced by their order in the stream."""
    order: dict[bytes, bytes] = {}
    return re.sub(rb"(?:rs|fc|msg)_[0-9a-f]{32}", lambda found: order.setdefault(found[0], b"item-%d" % len(order)), events)


def whole(path: str, events: list[bytes]) -> Any:
    """What a client makes of a stream: the same for all cuts."""
    found: dict[Any, Any] = {}
    for event in decoded(each_of(by_order(b"".join(events)))):
        if path == "/v1/chat/completions":
            _add(found, event, ())
        elif "delta" in event and isinstance(event["delta"], str):
            found.setdefault((event["type"], event["item_id"], event["output_index"]), []).append(event["delta"])
        elif event["type"] == "content_block_delta":
            _add(found, event["delta"], (event["index"],))
        else:
            event.pop("sequence_number", None)
            found.setdefault(event["type"], []).append(event)
    return {key: "".join(value) if value and all(isinstance(each, str) for each in value) else value for key, value in found.items()}


def _add(found: dict[Any, Any], value: Any, path: tuple[Any, ...]) -> None:
    for name, member in value.items():
        if isinstance(member, dict):
            _add(found, member, (*path, name))
        elif isinstance(member, list) and member and isinstance(member[0], dict) and "index" in member[0]:
            for each in member:
                _add(found, each, (*path, name, each["index"]))
        elif isinstance(member, list):
            found.setdefault((*path, name), []).extend(member)
        elif member is not None and (not path or name not in ("index", "type")):
            texts = found.setdefault((*path, name), [])
            if path or member not in texts:
                texts.append(member)


def continued(shown: Shown, first: list[bytes], *others: list[bytes]) -> list[bytes]:
    """What a client gets when each but the last of these streams ends within."""
    got = []
    for events in (first, *others):
        if got:
            shown.begin_again()
        got += [rest for event in events if (rest := shown.take(event))]
    return got


@pytest.mark.parametrize("path", STREAMS)
def test_wherever_the_first_server_ends_the_answer_is_whole(path: str) -> None:
    make = STREAMS[path]
    for seed in range(12):
        rng = random.Random(seed)
        first, second, third = (make(rng, server) for server in (1, 2, 3))
        undisturbed = whole(path, first)
        for place in range(1, len(first), 1 + seed % 5):
            got = continued(SHOWN[path](), first[:place], second[: rng.randrange(len(second))], third)
            assert whole(path, got) == undisturbed, (seed, place)


@pytest.mark.parametrize("path", STREAMS)
def test_an_undisturbed_stream_passes_unchanged(path: str) -> None:
    events = STREAMS[path](random.Random(1), 1)
    assert decoded(continued(SHOWN[path](), events)) == decoded(events)


@pytest.mark.parametrize("path", STREAMS)
def test_every_event_of_a_continued_stream_has_the_first_ones_ids_and_numbers(path: str) -> None:
    first, second = (STREAMS[path](random.Random(server), server) for server in (1, 2))
    got = b"".join(continued(SHOWN[path](), first[: len(first) // 2], second))
    ids = {"chatcmpl-2", "msg-of-2", f"resp_{2:032x}"}
    assert not any(id_.encode() in got for id_ in ids)
    numbers = [event["sequence_number"] for event in decoded(each_of(got)) if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("path", STREAMS)
def test_another_text_is_found_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = STREAMS[path](random.Random(1), 1)
    others = [Words(part.text.replace("hello", "hallo")) if isinstance(part, Words) else part for part in PARTS]
    monkeypatch.setattr(sys.modules[__name__], "PARTS", others)
    second = STREAMS[path](random.Random(1), 2)
    with pytest.raises(Diverged, match="the text differs"):
        continued(SHOWN[path](), first[:-3], second)


@pytest.mark.parametrize("path", SHOWN)
def test_a_stream_that_cannot_go_on_ends_with_its_apis_error(path: str) -> None:
    shown = SHOWN[path]()
    error = json.loads(split(shown.error("It is lost.", "backend_lost"))[1])
    assert "It is lost." in (error.get("message"), error.get("error", {}).get("message"))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_come_whole_however_they_are_cut(end: bytes) -> None:
    stream = b"".join(STREAMS["/v1/messages"](random.Random(3), 1)) + b": a comment\n\ndata: the rest"
    stream = stream.replace(b"\n", end)
    for seed in range(50):
        rng, whole_events, passed, rest = random.Random(seed), WholeEvents(), b"", stream
        while rest:
            size = rng.randrange(1, 400)
            piece = whole_events.push(rest[:size])
            assert piece == b"" or piece.endswith(end * 2)
            passed, rest = passed + piece, rest[size:]
        assert passed + whole_events.end() == stream


def test_numbers_go_on_from_where_the_client_picked_the_stream_up() -> None:
    def event(number: int) -> bytes:
        members = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "ab"[number - 7]}
        return b"data: " + json.dumps(members | {"sequence_number": number}).encode() + b"\n\n"

    shown = ShownResponse()
    shown.take(event(7))
    shown.begin_again()
    assert shown.take(event(7)) == b"" and b'"sequence_number":8' in shown.take(event(8))
