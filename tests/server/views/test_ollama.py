"""Ollama's API: lines and wholes, calls and their results, options, schemas, errors in its shape, and what clients look up first."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import TOKENIZER, EdgeServer
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.ollama.translation import OllamaMessage, chat_body
from vnext.server.views.ollama import OllamaChatBody
from vnext.state.events import unpack_tokens

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]"
    "{{ message.content }}{% for call in message.tool_calls %}<{{ call.id }}>{% endfor %}{% endfor %}{% if tools %}<tool_call>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as running:
        yield running


def lines(server: EdgeServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text, headers = server.post(path, body)
    assert status == 200 and headers.get_content_type() == "application/x-ndjson"
    return [json.loads(line) for line in text.splitlines()]


def said(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say:{words}"}]


def last_request(server: EdgeServer) -> SubmitRequest:
    return server.engine.of_kind(SubmitRequest)[-1]


def prompt_of(request: SubmitRequest) -> str:
    return TOKENIZER.decode(unpack_tokens(request.prompt).tolist())


def test_a_chat_is_a_stream_of_lines(server):
    found = lines(server, "/api/chat", {"model": "toy:latest", "messages": said("Grüße aus Köln")})
    assert "".join(each["message"]["content"] for each in found) == "Grüße aus Köln"
    assert [each["done"] for each in found] == [False] * (len(found) - 1) + [True]
    end = found[-1]
    assert end["done_reason"] == "stop" and end["model"] == "toy" and end["eval_count"] > 3 and end["prompt_eval_count"] > 3
    assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"] > 0


def test_without_a_stream_it_is_one_object(server):
    status, found, _ = server.post("/api/chat", {"messages": said("whole"), "stream": False})
    assert status == 200 and found["message"] == {"role": "assistant", "content": "whole"} and found["done"]
    status, found, _ = server.post("/api/generate", {"prompt": "say:text", "stream": False, "system": "Be kind."})
    assert found["response"] == "text" and prompt_of(last_request(server)) == "[system]Be kind.[user]say:text"
    plain = {"prompt": "say:raw", "raw": True, "stream": False}
    assert server.post("/api/generate", plain | {"think": False})[1]["response"] == "raw", "which reasons nowhere"
    assert server.post("/api/generate", plain)[1]["response"] == "raw"
    assert prompt_of(last_request(server)) == "say:raw"


def test_options_are_the_engine_s(server):
    options = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 3, "num_predict": 5, "repeat_penalty": 1.5,
        "num_ctx": 8192, "num_thread": 2,
    }  # fmt: skip
    found = lines(server, "/api/generate", {"prompt": "no order", "options": options})
    asked = last_request(server).sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed, asked.max_tokens) == (0.5, 0.25, 7, 0.125, 3, 5)
    assert asked.repetition_penalty == 1.5 and found[-1]["done_reason"] == "length" and found[-1]["eval_count"] == 5


@pytest.mark.parametrize("given", [{"arguments": {}}, {"arguments": "{}"}, {"arguments": '{"at": "no'}, {"arguments": None}, {}])
def test_a_call_has_an_object_and_its_result_finds_it(server, given):
    found = lines(server, "/api/chat", {"messages": said(CALL), "tools": [WEATHER]})
    calls = [call for each in found for call in each["message"].get("tool_calls", [])]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]
    messages = [
        *said(""), {"role": "assistant", "content": "", "tool_calls": [*calls, {"function": {"name": "time", **given}}]},
        {"role": "tool", "content": "noon", "tool_name": "time"}, {"role": "tool", "content": "say:sun"},
    ]  # fmt: skip
    status, answer, _ = server.post("/api/chat", {"messages": messages, "tools": [WEATHER], "stream": False})
    assert status == 200, answer
    assert "<call-1-0><call-1-1>[tool call-1-1]noon[tool call-1-0]say:sun" in prompt_of(last_request(server))


def test_a_schema_is_kept_to_and_thinking_asked_for():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = chat_body(OllamaChatBody(messages=[OllamaMessage(role="user", content="x")], format=schema, think=False))
    assert body.response_format.json_schema.schema == schema and body.enable_thinking is False
    body = chat_body(OllamaChatBody(messages=[OllamaMessage(role="user", content="x")], format="json", think="high"))
    assert body.response_format.type == "json_object" and body.reasoning_effort == "high"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "other", "messages": said("")}, 404, "'other' is not served here"),
        ("/api/chat", {"messages": said(""), "options": {"temperature": -1}}, 400, "options.temperature"),
        ("/api/chat", {"messages": said(""), "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"messages": said(""), "format": "yaml"}, 400, "format is 'yaml'"),
        ("/api/chat", {"messages": said(""), "format": {"type": "rain"}}, 400, "format"),
        ("/api/chat", {"messages": said(""), "format": {"enum": 1}}, 400, "format cannot be kept at enum: it is a list of values"),
        ("/api/chat", {"messages": said(""), "tools": [{"function": {"name": "f", "description": {}}}]}, 400, "tools[0].function.description"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, 400, "/api/chat"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "raw"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": "high"}, 400, "think does not go with raw or suffix"),
        ("/api/chat", {"messages": said(""), "options": {"num_predict": 0}}, 400, "options.num_predict is 0: it must be at least 1."),
        ("/api/chat", {"keep_alive": "soon"}, 400, "keep_alive is 'soon': it must be seconds, or a duration such as '5m'."),
        ("/api/generate", {"prompt": "a", "keep_alive": "5 m"}, 400, "keep_alive"),
        ("/api/embed", {"input": "a", "keep_alive": "5d"}, 400, "keep_alive"),
        ("/api/embed", {"model": "other"}, 404, "'other' is not served here"),
        ("/api/embeddings", {"model": "other", "prompt": ""}, 404, "'other' is not served here"),
        ("/api/embeddings", {"prompt": ["a"]}, 400, "prompt"),
        ("/api/embeddings", {"input": "a"}, 400, "input"),
        ("/api/show", {"model": "other"}, 404, "'other' is not served here"),
        ("/api/nothing", {}, 404, "/api/nothing"),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(server, path, body, status, words):
    found = server.post(path, body)
    assert found[0] == status and [*found[1]] == ["error"] and words in found[1]["error"]


def test_what_clients_look_up_first(server):
    _, found, _ = server.get("/api/tags")
    assert [each["name"] for each in found["models"]] == ["toy", "other-name"] and server.get("/api/ps")[1] == found
    assert tuple(map(int, server.get("/api/version")[1]["version"].split("."))) >= (0, 9, 0)
    _, shown, _ = server.post("/api/show", {"model": "toy"})
    assert {"completion", "tools"} <= {*shown["capabilities"]} and shown["template"] == TEMPLATE
    assert shown["model_info"]["vnext.context_length"] > 0
    _, loaded, _ = server.post("/api/generate", {"model": "toy", "keep_alive": -1})
    assert loaded["done"] and loaded["done_reason"] == "load" and loaded["response"] == ""
    for given, reason in {0: "unload", "0s": "unload", "-0": "unload", 0.5: "load", "1h30m": "load", "-1": "load", "": "refused"}.items():
        loaded = server.post("/api/chat", {"keep_alive": given})[1]
        assert loaded.get("done_reason", "refused") == reason, given
    assert server.post("/api/embeddings", {"model": "toy", "prompt": ""})[:2] == (200, {"embedding": []})
    for empty in ({}, {"input": ""}, {"input": []}):
        assert server.post("/api/embed", {"model": "toy", **empty})[1]["embeddings"] == []


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
def test_a_client_that_asks_whether_it_runs_needs_no_body(server, path):
    """The `ollama` command begins with HEAD /."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("HEAD", path)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read() == b""
    connection.close()


def test_a_model_without_a_template_takes_the_text_as_it_is():
    with EdgeServer(byte_level(None)) as plain:
        for path, body in {"/api/generate": {"prompt": "a"}, "/api/chat": {"messages": said("")}}.items():
            status, found, _ = plain.post(path, body)
            assert status == 400 and "send the text to /api/generate with raw" in found["error"]
        assert plain.post("/api/generate", {"prompt": "say:a", "raw": True, "stream": False})[1]["response"] == "a"
