"""Calls that break off: an answer that ends with tool_calls has arguments that are valid JSON, and a cut shows no mark, at every door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import TOKENIZER, EdgeServer
from test_tools import TEMPLATE, WEATHER
from toy_tokenizers import byte_level

BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": Köln}}</tool_call>'
WHOLE = '<tool_call>{"name": "weather", "arguments": {"city": "Köln", "now": True,}}</tool_call>'
ARGUMENTS = '{"city": "Köln", "now": true}'


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as running:
        yield running


def chat(server: EdgeServer, words: str, **options: Any) -> tuple[str, list[str], str]:
    """Content, the arguments of each call, and the end."""
    messages = [{"role": "user", "content": f"say:{words}"}]
    body = {"model": "toy", "messages": messages, "tools": [WEATHER]} | options
    answer = server.openai().chat.completions.create(**body)
    if not options.get("stream"):
        [choice] = answer.choices
        calls = [call.function.arguments for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    content, made, finish = "", {}, ""
    for chunk in answer:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            made[call.index] = made.get(call.index, "") + call.function.arguments
        finish = choice.finish_reason or finish
    return content, [*made.values()], finish


def message(server: EdgeServer, words: str, **options: Any) -> tuple[list[tuple[str, Any]], str]:
    """/v1/messages: its blocks and the end."""
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
    messages = [{"role": "user", "content": f"say:{words}"}]
    _, answer, _ = server.post(
        "/v1/messages", {"model": "toy", "max_tokens": 400, "messages": messages, "tools": [tool]} | options
    )
    if not options.get("stream"):
        return [(block["type"], block.get("input", block.get("text"))) for block in answer["content"]], answer["stop_reason"]
    sent = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: ")]
    kinds = [event["content_block"]["type"] for event in sent if event["type"] == "content_block_start"]
    pieces = [""] * len(kinds)
    for event in sent:
        if event["type"] == "content_block_delta":
            pieces[event["index"]] += event["delta"].get("partial_json", event["delta"].get("text", ""))
    return [*zip(kinds, pieces)], next(event["delta"]["stop_reason"] for event in sent if event["type"] == "message_delta")


def response(server: EdgeServer, words: str, **options: Any) -> list[tuple[str, str, str]]:
    """/v1/responses: kind, text and status of its items."""
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    answer = server.openai().responses.create(**{"model": "toy", "input": f"say:{words}", "tools": [tool]} | options)
    if options.get("stream"):
        answer = [event for event in answer][-1].response
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text, item.status)
        for item in answer.output
    ]


def test_a_call_that_cannot_be_read_is_text(server: EdgeServer) -> None:
    assert chat(server, BROKEN) == (BROKEN, [], "stop")
    assert message(server, BROKEN) == ([("text", BROKEN)], "end_turn")
    assert response(server, BROKEN) == [("message", BROKEN, "completed")]


def test_a_stream_that_has_sent_its_beginning_ends_with_stop(server: EdgeServer) -> None:
    rest = BROKEN[BROKEN.index("K") :]
    assert chat(server, BROKEN, stream=True) == (rest, ['{"city": '], "stop")
    assert message(server, BROKEN, stream=True) == ([("tool_use", '{"city": '), ("text", rest)], "end_turn")
    assert response(server, BROKEN, stream=True) == [
        ("function_call", '{"city": ', "incomplete"),
        ("message", rest, "completed"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_be_read_is_a_call(server: EdgeServer, stream: bool) -> None:
    assert chat(server, WHOLE, stream=stream) == ("", [ARGUMENTS], "tool_calls")
    [(kind, given)], end = message(server, WHOLE, stream=stream)
    assert (kind, json.loads(given) if stream else given, end) == ("tool_use", json.loads(ARGUMENTS), "tool_use")
    assert response(server, WHOLE, stream=stream) == [("function_call", ARGUMENTS, "completed")]


def test_a_stop_string_within_a_call_does_not_make_it_one(server: EdgeServer) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert chat(server, call, stop=["ln"]) == (call[: call.index("ln")], [], "stop")
    assert chat(server, call, stop=["ln"], stream=True) == ("", ['{"city": "Kö'], "stop")
    for stream in (False, True):
        assert chat(server, call, stop=["tool_call>"], stream=stream)[1:] == ([], "stop")
        assert chat(server, call, stop=["/tool_call>"], stream=stream) == ("", ['{"city": "Köln"}'], "tool_calls")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SIZE = len(TOKENIZER.encode(CALL))
GIVEN = '{"city": "Köln"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("missing", [1, 5, 11, 12, 13])
def test_an_answer_that_is_cut_within_its_closing_mark_shows_none_of_it(server: EdgeServer, missing: int, stream: bool) -> None:
    size = SIZE - missing
    assert chat(server, CALL, stream=stream, max_tokens=size) == ("", [GIVEN], "length")
    [(kind, given)], end = message(server, CALL, stream=stream, max_tokens=size)
    assert (kind, json.loads(given) if stream else given, end) == ("tool_use", json.loads(GIVEN), "max_tokens")
    assert response(server, CALL, stream=stream, max_output_tokens=size) == [("function_call", GIVEN, "completed")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 8, 11, 20, 30])
def test_a_forced_call_that_is_cut_shows_none_of_its_opening(server: EdgeServer, size: int, stream: bool) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", forced):
        assert chat(server, CALL, stream=stream, max_tokens=size, tool_choice=choice) == ("", [], "length")
    assert message(server, CALL, stream=stream, max_tokens=size, tool_choice={"type": "any"}) == ([], "max_tokens")
    [(kind, text, status)] = response(server, CALL, stream=stream, max_output_tokens=size, tool_choice="required")
    assert (kind, text, status) == ("message", "", "incomplete")
    second = chat(server, CALL + CALL, stream=stream, max_tokens=SIZE + size, tool_choice="required")
    assert second == ("", [GIVEN], "length")
