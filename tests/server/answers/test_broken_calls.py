"""Calls that break off: an answer that ends with tool_calls has arguments that are valid JSON, at every door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import EdgeServer
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
