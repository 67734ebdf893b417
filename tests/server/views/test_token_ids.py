"""What a client may ask for beside the text: the tokens of its prompt and of the answers, and the usage so far in
every chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_server import EOS, TOKENIZER, EdgeServer

WORDS = "say:hé, 😀"
ANSWER = [*TOKENIZER.encode(WORDS.removeprefix("say:")), EOS]
ASKED = {"max_tokens": 50, "return_token_ids": True}
COMPLETION = ("/v1/completions", {"prompt": WORDS} | ASKED)
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]} | ASKED)


def whole(server: EdgeServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = server.post(path, body)
    assert status == 200, answer
    return answer


def chunks(server: EdgeServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = whole(server, path, body | {"stream": True}).split("\n\n")[:-1]
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_completions_tell_the_tokens_of_prompt_and_answer(server: EdgeServer) -> None:
    path, body = COMPLETION
    answer = whole(server, path, body | {"n": 2})
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == TOKENIZER.encode(WORDS)
        assert choice["token_ids"] == ANSWER, "the token that ended it as well"
    assert answer["usage"]["completion_tokens"] == 2 * len(ANSWER)
    several = whole(server, path, body | {"prompt": [[80, 81, 82], [70, 71]], "max_tokens": 1})["choices"]
    assert [choice["prompt_token_ids"] for choice in several] == [[80, 81, 82], [70, 71]]


def test_a_chat_tells_the_prompt_beside_its_choices(server: EdgeServer) -> None:
    path, body = CHAT
    answer = whole(server, path, body | {"n": 2})
    for choice in answer["choices"]:
        *words, last = choice["token_ids"]
        assert TOKENIZER.decode(words) == choice["message"]["content"] and last == EOS
    asked = {"messages": body["messages"]}
    assert answer["prompt_token_ids"] == server.post("/tokenize", asked)[1]["tokens"]


def test_streamed_tokens_together_are_the_answer_s(server: EdgeServer) -> None:
    path, body = COMPLETION
    found = [chunk["choices"][0] for chunk in chunks(server, path, body)]
    assert [token for choice in found for token in choice["token_ids"]] == ANSWER
    assert [choice["prompt_token_ids"] for choice in found] == [TOKENIZER.encode(WORDS)] + [None] * (len(found) - 1)
    path, body = CHAT
    found = chunks(server, path, body | {"n": 2})
    for index in (0, 1):
        mine = [chunk for chunk in found if chunk["choices"][0]["index"] == index]
        *words, last = [token for chunk in mine for token in chunk["choices"][0].get("token_ids", [])]
        assert (
            TOKENIZER.decode(words) == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in mine)
            and last == EOS
        )
        assert mine[0]["prompt_token_ids"] and not any("prompt_token_ids" in chunk for chunk in mine[1:])


@pytest.mark.parametrize(("stop", "count"), [("h", 1), (", ", 5)])
def test_a_stop_string_s_tokens_belong_to_the_answer(server: EdgeServer, stop: str, count: int) -> None:
    path, body = COMPLETION
    answer = whole(server, path, body | {"stop": stop})
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] <= count
    assert answer["choices"][0]["token_ids"] == ANSWER[: len(answer["choices"][0]["token_ids"])]


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_nobody_gets_tokens_who_did_not_ask(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    for asked in ({"return_token_ids": False}, {"return_token_ids": None}):
        assert "token_ids" not in json.dumps(whole(server, path, body | asked))
        assert "token_ids" not in whole(server, path, body | asked | {"stream": True})


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
@pytest.mark.parametrize("with_ids", [False, True])
def test_the_usage_so_far_is_in_every_chunk(server: EdgeServer, path: str, body: dict[str, Any], with_ids: bool) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": with_ids}
    found = chunks(server, path, body | options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    choices = [(chunk["choices"] or [{}])[0] for chunk in found]
    for place in range(1, len(found)):
        says_more = choices[place].get("text") or choices[place].get("delta", {}).get("content")
        began = "role" in choices[place - 1].get("delta", {})  # made with the first token
        assert counts[place] > counts[place - 1] if says_more and not began else counts[place] >= counts[place - 1]
    assert counts[0] >= 1 and counts[-1] == counts[-2] >= len(ANSWER)
    assert all(
        chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + count for chunk, count in zip(found, counts)
    )


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_without_include_usage_there_is_none(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    for options in ({"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}, {}):
        assert not any("usage" in chunk for chunk in chunks(server, path, body | {"stream_options": options}))
    usual = chunks(server, path, body | {"stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in usual[:-1]) and usual[-1]["usage"]["completion_tokens"] >= len(ANSWER)
