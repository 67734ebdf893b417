"""Malformed bodies: each gets an error object that names the field, and the next good request still works."""

from __future__ import annotations

import http.client
import json
from typing import Any

import openai
import pytest
from edge_server import EdgeServer

DEEP = b"[" * 20_000 + b"]" * 20_000
USER = {"role": "user", "content": "hi"}

BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"nope", "JSON"),
    (b'{"prompt": "a"', "JSON"),
    (b'{"prompt": "a"} {}', "JSON"),
    (b'{"model": "\xff\xfe"}', "JSON"),
    (b'{"model": "\\ud800"}', "JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "JSON"),
    (b'{"prompt": "a", "user": ' + DEEP + b"}", "nested too deeply"),
    (b'{"prompt": "a", "typical_p": ' + DEEP + b"}", "nested too deeply"),
    (DEEP, "expected `object`"),
    (b"[]", "expected `object`"),
    (b"null", "expected `object`"),
]

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperatur": 1}, "temperatur"),
    ({"model": 5}, "model"),
    ({"model": "unknown"}, "model"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": True}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**80}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[...]"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 300}, "stop"),
    ({"stop": ["x" * 1000] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"stream": True, "n": 0}, "n"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
]

COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, [5]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [[5], [5, 2**40]]}, "prompt[1][1]"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": ["a"] * 5000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1, "use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 0}, "best_of"),
    ({"messages": [USER]}, "messages"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "hi", "contant": 1}]}, "messages[0].contant"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "hi"}, "prompt"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]

TABLE = (
    [("/v1/completions", {"prompt": "hi"} | extra, param) for extra, param in COMMON + COMPLETIONS]
    + [("/v1/chat/completions", {"messages": [USER]} | extra, param) for extra, param in COMMON + CHAT]
    + [("/v1/completions", {}, "prompt"), ("/v1/chat/completions", {}, "messages")]
)


def assert_works(server: EdgeServer) -> None:
    status, answer, _ = server.post("/v1/completions", {"prompt": "say:fine"})
    assert status == 200 and answer["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(("path", "body", "param"), TABLE, ids=[f"{path[4:8]}-{param}" for path, _, param in TABLE])
def test_the_field_is_named(server: EdgeServer, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, _ = server.post(path, body)
    error = answer["error"]
    assert status in (400, 404), answer
    assert error["param"] == param and error["type"] == "invalid_request_error"
    named = param.rpartition(".")[2].partition("[")[0] in error["message"]
    assert (named or error["code"] == "context_length_exceeded") and len(error["message"]) < 400
    assert_works(server)


@pytest.mark.parametrize(("body", "word"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_body_at_all(server: EdgeServer, path: str, body: bytes, word: str) -> None:
    if b"prompt" in body and "chat" in path:
        body = body.replace(b'"prompt": "a"', b'"messages": []').replace(b"typical_p", b"audio")
    status, answer, _ = server.post(path, body)
    assert status == 400 and word in answer["error"]["message"], answer
    assert_works(server)


CONTEXT = (
    "This model's maximum context length is 512 tokens. However, you requested {all} tokens ({prompt} in the {what}, {answer} in "
    "the completion). Please reduce the length of the {what} or completion."
)
LONG = [
    ({"prompt": [5] * 600}, dict(what="prompt", prompt=600, answer=1, all=601)),
    ({"prompt": [5] * 512, "max_tokens": 1}, dict(what="prompt", prompt=512, answer=1, all=513)),
    ({"prompt": [5] * 12, "max_tokens": 501}, dict(what="prompt", prompt=12, answer=501, all=513)),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, dict(what="messages", prompt=600, answer=1, all=601)),
    ({"messages": [USER], "max_tokens": 512}, dict(what="messages", prompt=2, answer=512, all=514)),
    ({"messages": [USER], "max_completion_tokens": 600}, dict(what="messages", prompt=2, answer=600, all=602)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "counts"), LONG)
def test_more_than_the_context_is_refused_in_openais_words(
    server: EdgeServer, body: dict[str, Any], counts: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        of_kind = server.openai().completions if "prompt" in body else server.openai().chat.completions
        of_kind.create(model="toy", stream=stream, **body)
    assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    special = caught.value.body["message"].partition("requested ")[2].partition(" tokens")[0]
    extra = int(special) - counts["all"]  # what the template writes around the words
    assert 0 <= extra < 40
    counts = counts | {"all": counts["all"] + extra, "prompt": counts["prompt"] + extra}
    assert caught.value.body["message"] == CONTEXT.format(**counts)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "k" * 50_000, "content": "a"}]}, "tool."),
        ("/v1/completions", {"prompt": "a", "model": "m" * 50_000}, "toy, other-name."),
        ("/v1/completions", {"prompt": "a", "temperature" + "e" * 50_000: 1}, ""),
        ("/v1/completions", {"prompt": "a", "n": 10**300}, "."),
    ],
)
def test_a_refusal_does_not_send_back_all_that_was_sent(server: EdgeServer, path: str, body: dict[str, Any], end: str) -> None:
    error = server.post(path, body)[1].get("error", {"message": "", "param": None})
    assert len(error["message"]) < 1_100 and error["message"].endswith(end) and len(error["param"] or "") < 300


def test_paths_and_methods(server: EdgeServer) -> None:
    for answer, code, words in (
        (server.get("/v1/nothing"), "not_found", "/v1/nothing: GET / lists"),
        (server.get("/v1/completions"), "method_not_allowed", "does not take GET: send POST."),
        (server.post("/health", b""), "method_not_allowed", "does not take POST: send GET or HEAD."),
    ):
        assert answer[0] in (404, 405) and answer[1]["error"]["code"] == code and words in answer[1]["error"]["message"]
    assert_works(server)


def test_a_body_over_the_bound() -> None:
    with EdgeServer(body_bytes_max=2000) as server:
        status, answer, _ = server.post("/v1/completions", {"prompt": "x" * 5000})
        assert status == 413 and answer["error"]["code"] == "too_large"
        assert_works(server)


@pytest.mark.parametrize("name", ["Accept", "Authorization", "Content-Encoding", "Content-Type", "Host", "Origin", "X-Request-Id"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nothing")])
def test_bytes_that_are_no_text_in_a_header_are_no_fault_of_the_server(server, name: str, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host=name == "Host")
    connection.putheader(name, b"http://caf\xdd")
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status < 500 and (response.status == 200 or answer["error"]["message"])
