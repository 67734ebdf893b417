"""Reasoning in the API's shape, whole and streamed, through the openai package; and in the history of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import TOKENIZER, EdgeServer
from test_tools import ASKED, WEATHER, prompt_of, request_of
from toy_tokenizers import byte_level, byte_level_backend

from vnext.runtime.protocol.messages import TokenLogprobs
from vnext.server.answers.chat_request import ChatRequest
from vnext.server.answers.logprobs import ChatLogprobs, speller
from vnext.server.call import Call
from vnext.server.context.openai_types import ChatBody, ChatMessage
from vnext.text.answer import Delta
from vnext.text.dialects.table import NAMES
from vnext.text.parts import Words
from vnext.text.reasoning import Marks, ReasoningParser
from vnext.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ tools | tojson if tools }}<tool_call>|{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if enable_thinking is defined %}({{ enable_thinking }}){% endif %}{% if opened %}<think>{% endif %}"
)
THOUGHT = "<think>\nfour < five\n</think>\n\n"


@pytest.fixture(scope="module")
def thinker() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as server:
        yield server


def ask(server: EdgeServer, words: str, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": f"say:{words}"}])
    return server.openai().chat.completions.create(model="toy", messages=messages, **options)


def streamed(server: EdgeServer, words: str, **options: Any) -> tuple[str, str, list[str], str, Any]:
    """Reasoning, content, the order in which they came, the end and the usage."""
    thought, content, kinds, finish, usage = "", "", [], "", None
    for chunk in ask(server, words, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert getattr(choice.delta, "reasoning", None) == getattr(choice.delta, "reasoning_content", None)
            piece = getattr(choice.delta, "reasoning", None) or ""
            assert not (piece and choice.delta.content)
            thought, content = thought + piece, content + (choice.delta.content or "")
            kinds += [kind for kind, text in (("r", piece), ("c", choice.delta.content)) if text]
            finish = choice.finish_reason or finish
    return thought, content, kinds, finish, usage


def test_reasoning_stands_apart(thinker: EdgeServer) -> None:
    answer = ask(thinker, f"{THOUGHT}Nine <think>.")
    message = answer.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Nine <think>.", "four < five", "four < five")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("\nfour < five\n")
    thought, content, kinds, finish, usage = streamed(thinker, f"{THOUGHT}Nine <think>.")
    assert (thought, content, finish) == ("four < five", "Nine <think>.", "stop")
    assert kinds == sorted(kinds, reverse=True) and kinds.count("r") > 3 and kinds.count("c") > 3
    assert usage.completion_tokens_details == answer.usage.completion_tokens_details


def test_an_answer_without_reasoning_has_none(thinker: EdgeServer) -> None:
    answer = ask(thinker, "Nine.", logprobs=True)
    assert answer.choices[0].message.content == "Nine." and not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0 and len(answer.choices[0].logprobs.content) == 5


def test_the_prompt_may_begin_the_reasoning(thinker: EdgeServer) -> None:
    opened = {"chat_template_kwargs": {"opened": True}}
    answer = ask(thinker, "", messages=[{"role": "user", "content": "x"}], max_tokens=4, extra_body=opened)
    choice = answer.choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("xxxx", None, "length")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


def test_reasoning_can_be_hidden(thinker: EdgeServer) -> None:
    hide = {"include_reasoning": False}
    answer = ask(thinker, f"{THOUGHT}Nine.", extra_body=hide)
    assert answer.choices[0].message.content == "Nine." and not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert streamed(thinker, f"{THOUGHT}Nine.", extra_body=hide)[:2] == ("", "Nine.")


def test_calls_follow_the_reasoning(thinker: EdgeServer) -> None:
    choice = ask(thinker, f"<think>{ASKED}</think>{ASKED}", tools=[WEATHER]).choices[0]
    assert choice.message.reasoning == ASKED and choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert streamed(thinker, f"<think>{ASKED}</think>{ASKED}", tools=[WEATHER])[0] == ASKED


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_goes_to_the_template(thinker: EdgeServer, name: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln",  "n":1.0}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, name: "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "wet"}]},
        {"role": "assistant", name: "alone"},
    ]
    answer = ask(thinker, "", messages=messages, max_tokens=1)
    text = '|[user]x[assistant]<think>hm</think>{"city":"Köln",  "n":1.0}[tool]wet[assistant]<think>alone</think>'
    assert prompt_of(thinker, answer.id).endswith(text)


def test_what_switches_reasoning(thinker: EdgeServer) -> None:
    cases = [({"enable_thinking": True}, "(True)"), ({"reasoning_effort": "none"}, "(False)"), ({}, "x")]
    cases.append(({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "(False)"))
    for body, end in cases:
        answer = ask(thinker, "", messages=[{"role": "user", "content": "x"}], max_tokens=1, extra_body=body)
        assert prompt_of(thinker, answer.id).endswith(end), body


def test_what_bounds_the_answer_begins_after_the_reasoning(thinker: EdgeServer) -> None:
    opened = {"chat_template_kwargs": {"opened": True}, "thinking_token_budget": 5}
    close = tuple(TOKENIZER.encode("</think>", False))
    for body, options, expected in (
        (opened, {}, (False, close, 5)),
        (opened, {"tools": [WEATHER], "tool_choice": "required"}, (True, close, 5)),
        (opened | {"thinking_token_budget": None}, {"response_format": {"type": "json_object"}}, (True, close, -1)),
        ({"thinking_token_budget": 5}, {"response_format": {"type": "json_object"}}, (True, (), -1)),
    ):
        answer = ask(thinker, "</think>a", extra_body=body, **options)
        found = request_of(thinker, answer.id).sampling.constraint
        assert (bool(found.grammar), found.reasoning_end, found.reasoning_max) == expected, body
    assert request_of(thinker, ask(thinker, "a", extra_body={"thinking_token_budget": 5}).id).sampling.constraint is None


def test_an_answer_decides_by_its_first_tokens_whether_it_reasons() -> None:
    """Under a template that shows no mark unless reasoning is off, as Qwen 3's."""
    closing = "{{ messages }}{% if enable_thinking is false %}<think></think>{% endif %}"
    object_, budget = {"response_format": {"type": "json_object"}}, {"thinking_token_budget": 5}
    special = byte_level_backend()
    special.add_special_tokens(["<think>", "</think>"])
    for backend, size in ((special, 1), (byte_level_backend(), 7)):
        tokenizer = Tokenizer(backend, {}, closing)
        begin, end = (tuple(tokenizer.encode(mark, False)) for mark in ("<think>", "</think>"))
        assert len(begin) == size
        with EdgeServer(tokenizer) as server:
            for body, expected in (
                (object_, (True, begin, end, -1) if size == 1 else (True, (), (), -1)),
                (object_ | budget, (True, begin, end, 5 + size)),
                (object_ | {"enable_thinking": True}, (True, begin, end, -1)),
                (object_ | {"reasoning_effort": "low"}, (True, begin, end, -1)),
                (object_ | {"enable_thinking": False}, (True, (), (), -1)),
                (budget, (False, begin, end, 5 + size)),
            ):
                answer = ask(server, "a", extra_body=body)
                found = request_of(server, answer.id).sampling.constraint
                assert (bool(found.grammar), found.reasoning_begin, found.reasoning_end, found.reasoning_max) == expected, body
            assert request_of(server, ask(server, "a").id).sampling.constraint is None


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    for template, skip in (("{{ messages }}[/THINK]", False), ("{{ messages }}</think>", True), ("{{ messages }}", True)):
        with EdgeServer(Tokenizer(backend, {}, template)) as server:
            body = ChatBody(messages=[ChatMessage(role="user", content="x")])
            chat = ChatRequest(Call(None, server.context, body, "", 0.0, "chatcmpl-1", 0, "chatcmpl-1"), body)
            assert chat.params.skip_special_tokens == skip, template


LOGGED = [  # what the model writes, and its words
    (f"{THOUGHT}Nine <think>.", "Nine <think>."),
    ("Nine.", "Nine."),
    (f"{THOUGHT}Nine zähl \U0001f600 <b>{ASKED}", "Nine zähl \U0001f600 <b>"),
    (f"{THOUGHT}{ASKED}", ""),
    (f"{ASKED} so. {ASKED}on <tool", "so.on <tool"),
]


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(("written", "words"), LOGGED)
def test_log_probabilities_are_those_of_the_words(thinker: EdgeServer, written: str, words: str, hides: bool) -> None:
    """At both doors that have them, whole and streamed: no token of a thought, of a call or of a mark."""
    options = {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1, "extra_body": {"include_reasoning": not hides}}
    [choice] = ask(thinker, written, **options).choices
    whole = [bytes(entry.bytes) for entry in choice.logprobs.content]
    assert b"".join(whole).decode() == words == (choice.message.content or "")
    streamed_bytes, content = b"", ""
    for chunk in ask(thinker, written, stream=True, **options):
        for each in chunk.choices:
            pieces = b"".join(bytes(entry.bytes) for entry in (each.logprobs.content if each.logprobs else []))
            assert not pieces or each.delta.content
            streamed_bytes, content = streamed_bytes + pieces, content + (each.delta.content or "")
    assert streamed_bytes == b"".join(whole) and content == words
    tool = {"type": "function", **WEATHER["function"]}
    asked = {"input": f"say:{written}", "tools": [tool], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = thinker.openai().responses.create(model="toy", **asked)
    texts = [part for item in answer.output if item.type == "message" for part in item.content]
    assert "".join(part.text for part in texts) == words
    for part in texts:
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text


def test_a_token_that_words_share_with_a_mark_shows_their_part() -> None:
    backend, texts = byte_level_backend(), ["<think>", "a</", "think>\nNi", "ne <", "tool_c", "all> "]
    backend.add_tokens(texts)
    tokenizer = Tokenizer(backend, {}, None)
    entries = ChatLogprobs(tokenizer, speller(tokenizer, False), 0, is_parsed=True)
    parser, found, shown, length = ReasoningParser(Marks("<think>", "</think>"), False, NAMES["hermes"].parser([])), [], "", 0
    for text in texts:
        length += len(text)
        entries.push(
            Delta(
                text=text, tokens=(backend.token_to_id(text),), offsets=(length - len(text),), logprobs=(TokenLogprobs(-1.0, 0, ()),),
                token_ids=(), token_count=0, finish="", length=length,
            )
        )  # fmt: skip
        for part in parser.push(text) + (parser.finish() if text == texts[-1] else []):
            found += entries.of(part) if isinstance(part, Words) else []
            shown += part.text if isinstance(part, Words) else ""
    found += entries.rest()
    assert [entry["token"] for entry in found] == ["Ni", "ne <", "tool_c", "all> "] and shown == "Nine <tool_call> "
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in found)
