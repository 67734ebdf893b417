"""gpt-oss: channels, calls, constraints and the history, as its own chat template and marks have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from edge_server import TOKENIZER, EdgeServer
from test_tools import WEATHER, ask, is_allowed, prompt_of, request_of
from toy_tokenizers import byte_level, byte_level_backend

from vnext.server.answers.chat_request import ChatRequest
from vnext.server.call import Call
from vnext.server.context.conversation import prompt_text
from vnext.server.context.openai_types import ChatBody, ChatMessage, FunctionCall, ToolCall
from vnext.text.template import ChatTemplate
from vnext.text.tokenizer import Tokenizer

OPEN, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for message in messages %}[{{ message.role }}]"
    "{% if message.tool_calls %}{% if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "<|channel|>analysis<|message|>{{ message.thinking or message.content }}<|end|>"
    "{% for call in message.tool_calls %} to=functions.{{ call.function.name }} {{ call.function.arguments | tojson }}<|call|>"
    "{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def harmony() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as server:
        yield server


def test_channels_are_parts(harmony: EdgeServer) -> None:
    choice = ask(harmony, f"{OPEN}Rain?<|end|>{FINAL}It rains.", tools=[]).choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("Rain?", "It rains.", "stop")
    choice = ask(harmony, f'{OPEN}Rain?<|end|>{CALL}{{"a": 1}}<|call|>').choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("Rain?", None, "tool_calls")
    assert (call.function.name, call.function.arguments) == ("weather", '{"a": 1}')


def test_a_constraint_holds_in_the_message_after_the_reasoning(harmony: EdgeServer) -> None:
    end = tuple(TOKENIZER.encode("<|end|>", False))
    json_object = {"type": "json_object"}
    for options, budget, text in (
        ({"tools": [WEATHER], "tool_choice": "required"}, None, CALL + "{}"),
        ({"tools": [], "response_format": json_object}, 7, FINAL + "{}"),
        ({"tools": [], "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, None, FINAL + "yes"),
    ):
        extra = {"thinking_token_budget": budget} | options.pop("extra_body", {})
        answer = ask(harmony, "x", extra_body=extra, max_tokens=5, **options)
        constraint = request_of(harmony, answer.id).sampling.constraint
        assert prompt_of(harmony, answer.id).endswith(OPEN)
        assert (constraint.reasoning_end, constraint.reasoning_max) == (end, -1 if budget is None else budget)
        assert is_allowed(constraint, text) and not is_allowed(constraint, "{}") and not is_allowed(constraint, text + "?")
    assert not prompt_of(harmony, ask(harmony, "x").id).endswith(OPEN)


def test_a_call_ends_the_answer() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<|call|>", "<|end|>"])
    call = backend.token_to_id("<|call|>")
    with EdgeServer(Tokenizer(backend, {}, TEMPLATE)) as server:
        body = ChatBody(messages=[ChatMessage(role="user", content="x")], stop_token_ids=[5])
        params = ChatRequest(Call(None, server.context, body, "", 0.0, "chatcmpl-1", 0, "chatcmpl-1"), body).params
        assert params.stop_token_ids == [5, call] and not params.skip_special_tokens


def test_history_has_reasoning_or_words_before_a_call() -> None:
    called = ToolCall(id="a", function=FunctionCall(name="weather", arguments='{"city": "Köln"}'))
    messages = [
        ChatMessage(role="assistant", content="I look.", reasoning_content="Rain?", tool_calls=[called]),
        ChatMessage(role="tool", content="wet", tool_call_id="a"),
    ]
    text = prompt_text(ChatTemplate(TEMPLATE, {}), ChatBody(messages=messages), [WEATHER], 1.0)
    assert text.endswith(f'{OPEN}Rain?\n\nI look.<|end|> to=functions.weather {{"city": "Köln"}}<|call|>[tool]wet')
