"""Tool calls: told apart from words wherever the pieces of a text end, and in the API's shape through the openai package."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from edge_server import TOKENIZER, EdgeServer
from toy_tokenizers import byte_level

from vnext.runtime.messages import SubmitRequest
from vnext.state.events import unpack_tokens

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}"
    "[{{ message.role }}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]{{ message.content }}"
    "{% for call in message.tool_calls %}<{{ call.id }}:{{ call.function.name }}:{{ call.function.arguments.city }}>"
    "{% endfor %}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}},
}
ASKED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools_server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as server:
        yield server


def ask(server: EdgeServer, words: str, **options: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": f"say:{words}"}]
    return server.openai().chat.completions.create(model="toy", messages=messages, tools=[WEATHER], **options)


def prompt_of(server: EdgeServer, id_: str) -> str:
    found = [message for message in server.engine.of_kind(SubmitRequest) if message.name.startswith(id_)]
    return TOKENIZER.decode(unpack_tokens(found[0].prompt).tolist())


def test_an_answer_that_calls(tools_server: EdgeServer) -> None:
    answer = ask(tools_server, f"I look. {ASKED}{ASKED}")
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    first, second = choice.message.tool_calls
    assert first.type == "function" and first.function.name == "weather" and first.id != second.id
    assert json.loads(first.function.arguments) == {"city": "Köln"}
    assert prompt_of(tools_server, answer.id).startswith(json.dumps([WEATHER]))
    one = ask(tools_server, ASKED + ASKED, parallel_tool_calls=False).choices[0].message
    assert len(one.tool_calls) == 1 and one.content is None


def test_an_answer_that_does_not(tools_server: EdgeServer) -> None:
    choice = ask(tools_server, "It rains.").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.", None, "stop")
    reported = ask(tools_server, ASKED, tool_choice="none")
    assert reported.choices[0].message.content == ASKED and reported.choices[0].message.tool_calls is None
    assert "of a city" not in prompt_of(tools_server, reported.id)
    cut = ask(tools_server, ASKED, max_tokens=20).choices[0]
    assert cut.finish_reason == "length" and ASKED.startswith(cut.message.content) and len(cut.message.content) > 15


def test_a_stream_says_the_same(tools_server: EdgeServer) -> None:
    words, calls, ends = "", {}, []
    for chunk in ask(tools_server, f"I look. {ASKED}{ASKED}", stream=True):
        delta = chunk.choices[0].delta
        words += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index not in calls and (call.type, call.function.arguments) == ("function", "")
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.function.name is None and call.function.arguments
                calls[call.index][1] += call.function.arguments
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert words == "I look." and ends == ["tool_calls"]
    assert calls == {place: ["weather", json.dumps({"city": "Köln"}, ensure_ascii=False)] for place in range(2)}


def test_results_go_back_into_the_conversation(tools_server: EdgeServer) -> None:
    asked = ask(tools_server, ASKED).choices[0].message
    messages = [
        {"role": "user", "content": "Rain?"},
        asked.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "yes"},
    ]
    answer = tools_server.openai().chat.completions.create(model="toy", messages=messages, tools=[WEATHER], max_tokens=1)
    id_ = asked.tool_calls[0].id
    assert prompt_of(tools_server, answer.id).endswith(f"[user]Rain?[assistant]<{id_}:weather:Köln>[tool {id_}]yes")


def test_what_cannot_be_done_is_said(tools_server: EdgeServer, server: EdgeServer) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template of this model knows none"):
        ask(server, "a")
    with pytest.raises(openai.BadRequestError, match="cannot make a model call a tool"):
        ask(tools_server, "a", tool_choice={"type": "function", "function": {"name": "weather"}})
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="not the text of a JSON object") as caught:
        tools_server.openai().chat.completions.create(model="toy", messages=messages, tools=[WEATHER])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
