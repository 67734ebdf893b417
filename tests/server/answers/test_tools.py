"""Tool calls: told apart from words wherever the pieces of a text end, and in the API's shape through the openai package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from edge_server import TOKENIZER, EdgeServer
from llguidance import LLMatcher, LLTokenizer
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import unpack_tokens
from vnext.state.params import Constraint

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
    return server.openai().chat.completions.create(model="toy", messages=messages, **{"tools": [WEATHER], **options})


def request_of(server: EdgeServer, id_: str) -> SubmitRequest:
    return next(message for message in server.engine.of_kind(SubmitRequest) if message.name.startswith(id_))


def prompt_of(server: EdgeServer, id_: str) -> str:
    return TOKENIZER.decode(unpack_tokens(request_of(server, id_).prompt).tolist())


def tool_with(parameters: dict, name: str = "rain") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRICT = tool_with({"type": "object", "properties": {"a": {"type": "rain"}}})
STRICT["function"]["strict"] = True


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


def test_what_cannot_be_done_is_said(tools_server: EdgeServer) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    refused: list[tuple[str, dict]] = [
        ("names 'rain', which is not among tools", {"tool_choice": {"type": "function", "function": {"name": "rain"}}}),
        ("must be 'none', 'auto', 'required'", {"tool_choice": {"type": "custom"}}),
        ("there are no tools", {"tool_choice": "required", "tools": []}),
        ("makes the answer a call", {"tool_choice": named, "extra_body": {"structured_outputs": {"json_object": True}}}),
        ("cannot be combined with tool_choice", {"tool_choice": "required", "extra_body": {"use_beam_search": True}}),
        ("the strict tool 'rain' cannot be kept at properties.a: Invalid type: rain", {"tool_choice": "required", "tools": [STRICT]}),
        ("marks no reasoning", {"extra_body": {"thinking_token_budget": 3}}),
    ]
    for words, options in refused:
        with pytest.raises(openai.BadRequestError, match=words):
            ask(tools_server, "a", **options)


@pytest.mark.parametrize(
    "text", ["{", '{"city": "Kö', "[1]", "null", "7", '"x"', "{'city': 'Köln'}", "", "\x00", "[" * 5000, {"city": "Köln"}, {}, None]
)
def test_arguments_of_a_history_are_read_not_judged(tools_server: EdgeServer, text: Any) -> None:
    """A call that was cut off, as vnext's own may be, does not end the conversation."""
    client, function = tools_server.openai(), {"name": "weather", "arguments": text}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "broken"}
    answer = client.chat.completions.create(model="toy", messages=[call, result], tools=[WEATHER], max_tokens=1)
    assert "<a:weather:" in prompt_of(tools_server, answer.id)
    items = [
        {"type": "function_call", "call_id": "a", **function},
        {"type": "function_call_output", "call_id": "a", "output": "broken"},
    ]
    assert client.responses.create(model="toy", input=items, max_output_tokens=1).status in ("completed", "incomplete")


def is_allowed(constraint: Constraint, text: str) -> bool:
    """Whether an answer may be this text, as llguidance matches it."""
    tokenizer = LLTokenizer("byte", eos_token=0)
    matcher = LLMatcher(tokenizer, constraint.grammar)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def calling(name: str, arguments: str = '{"city": "Köln"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_forced_calls(tools_server: EdgeServer) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [tool_with(city, "weather"), tool_with(city, "rain")]
    both = f"{calling('rain')}\n{calling('weather')}"
    named = {"type": "function", "function": {"name": "rain"}}
    listed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for options, finish, two, other in (
        ({"tool_choice": "required"}, "tool_calls", True, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls", False, True),
        ({"tool_choice": listed}, "tool_calls", False, False),
        ({"tool_choice": named}, "stop", False, False),
    ):
        answer = ask(tools_server, calling("rain"), tools=tools, **options)
        assert answer.choices[0].finish_reason == finish and answer.choices[0].message.tool_calls[0].function.name == "rain"
        constraint = request_of(tools_server, answer.id).sampling.constraint
        assert is_allowed(constraint, calling("rain")) and not is_allowed(constraint, "It rains.")
        assert not is_allowed(constraint, calling("rain", "{}")) and not is_allowed(constraint, calling("snow"))
        assert is_allowed(constraint, both) == two and is_allowed(constraint, calling("weather")) == other
        assert '"weather"' in prompt_of(tools_server, answer.id), "the prompt's tools do not depend on the choice"
    assert request_of(tools_server, ask(tools_server, "a", tools=tools).id).sampling.constraint is None


@pytest.mark.parametrize("door", ["chat", "responses", "messages"])
def test_an_answer_beside_tools_is_a_call_or_keeps_the_schema(tools_server: EdgeServer, door: str) -> None:
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"], "additionalProperties": False}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "parameters": city}
    chat = {"messages": [{"role": "user", "content": f"say:{calling('weather')}"}], "max_tokens": 90}
    path, body, forced = {
        "chat": ("chat/completions", chat | {
            "tools": [{"type": "function", "function": function}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        }, {"type": "function", "function": {"name": "weather"}}),
        "responses": ("responses", {
            "input": f"say:{calling('weather')}", "tools": [{"type": "function", **function}],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        }, {"type": "function", "name": "weather"}),
        "messages": ("messages", chat | {
            "tools": [{"name": "weather", "input_schema": city}],
            "output_format": {"type": "json_schema", "schema": schema},
        }, {"type": "tool", "name": "weather"}),
    }[door]  # fmt: skip

    def constraint(**more: Any) -> Constraint:
        status, answer, _ = tools_server.post(f"/v1/{path}", body | {"model": "toy"} | more)
        assert status == 200, answer
        return tools_server.engine.of_kind(SubmitRequest)[-1].sampling.constraint

    either, call = constraint(), constraint(tool_choice=forced)
    assert is_allowed(either, '{"rain": true}') and is_allowed(either, calling("weather"))
    assert not any(is_allowed(either, text) for text in ("It rains.", '{"rain": 1}', calling("snow"), calling("weather", "{}"), ""))
    assert is_allowed(call, calling("weather")) and not is_allowed(call, '{"rain": true}'), "the schema waits for a later turn"


def test_allowed_tools_are_those_that_the_model_reads(tools_server: EdgeServer) -> None:
    listed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "rain"}}]}
    tools = [WEATHER, tool_with({}, "rain")]
    answer = ask(tools_server, "a", tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": listed})
    assert '"rain"' in prompt_of(tools_server, answer.id) and '"weather"' not in prompt_of(tools_server, answer.id)


def test_strict_tools_that_the_model_may_call(tools_server: EdgeServer) -> None:
    """Words are free, calls of strict tools keep to their schemas, and those of others take any object."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    strict = tool_with(city, "rain")
    strict["function"]["strict"] = True
    answer = ask(tools_server, f"I look. {calling('rain')}", tools=[strict, tool_with(city, "weather")])
    assert answer.choices[0].message.tool_calls[0].function.name == "rain"
    assert '"strict"' not in prompt_of(tools_server, answer.id)
    constraint = request_of(tools_server, answer.id).sampling.constraint
    for text in ("It rains.", "", calling("rain"), f"I look. {calling('rain')}{calling('rain')} on", calling("weather", "{}")):
        assert is_allowed(constraint, text), text
    for text in (calling("rain", "{}"), f"I look. {calling('snow')}", calling("weather", "1"), '<tool_call>\n{"name": "rain"'):
        assert not is_allowed(constraint, text), text
    for more in ({"tool_choice": "none"}, {"tools": [tool_with(city, "rain")]}):
        answer = ask(tools_server, "a", **({"tools": [strict]} | more))
        assert request_of(tools_server, answer.id).sampling.constraint is None
    wrong = tool_with({"type": "object", "properties": {"a": {"not": {"type": "null"}}}})
    wrong["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="strict tool 'rain' cannot be kept at properties.a: the keyword 'not' is not"):
        ask(tools_server, "a", tools=[wrong])


def asked_for(*ids: str, arguments: str = "{}") -> dict[str, Any]:
    calls = [{"id": id_, "type": "function", "function": {"name": "weather", "arguments": arguments}} for id_ in ids]
    return {"role": "assistant", "tool_calls": calls}


USER = {"role": "user", "content": "say:x"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([USER, {"role": "tool", "content": "r"}], "messages[1].tool_call_id", "is missing"),
        ([USER, {"role": "tool", "tool_call_id": "a", "content": "r"}], "messages[1].tool_call_id", "'a': no call before it"),
        ([asked_for("a"), {"role": "tool", "tool_call_id": "b", "content": "r"}], "messages[1].tool_call_id", "'b': no call before it"),
        ([asked_for("a"), USER], "messages[0].tool_calls[0].id", "the call 'a' has no result behind it"),
        (
            [asked_for("a", "b"), {"role": "tool", "tool_call_id": "a", "content": "r"}, USER],
            "messages[0].tool_calls[1].id",
            "the call 'b' has no result behind it",
        ),
        ([asked_for("a"), RESULT, RESULT, USER], "messages[2].tool_call_id", "is 'a': the call has a result already"),
        ([asked_for("a"), RESULT, USER, RESULT], "messages[3].tool_call_id", "is 'a': the call has a result already"),
        ([asked_for("a", "a"), RESULT, USER], "messages[0].tool_calls[1].id", "is 'a': a call that has no result yet has this id too"),
        ([asked_for("a"), asked_for("a"), RESULT, USER], "messages[1].tool_calls[0].id", "has this id too, make each unique"),
    ],
)
def test_calls_and_results_are_pairs(tools_server: EdgeServer, messages: list[dict[str, Any]], param: str, words: str) -> None:
    status, answer, _ = tools_server.post("/v1/chat/completions", {"messages": messages})
    assert (status, answer["error"]["param"]) == (400, param) and words in answer["error"]["message"]


def test_results_come_in_any_order_and_a_call_that_was_cut_needs_none(tools_server: EdgeServer) -> None:
    results = [{"role": "tool", "tool_call_id": id_, "content": "r"} for id_ in ("b", "a")]
    for messages in ([asked_for("a", "b"), *results, USER], [asked_for("a", arguments='{"ci'), USER], [asked_for("a"), *results[1:]] * 2):
        status, answer, _ = tools_server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert status == 200, answer


def test_pairs_are_pairs_at_every_door(tools_server: EdgeServer) -> None:
    use, result = ({"type": "tool_use", "id": "a", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "a", "content": "r"})
    for uses, results, param in (([use], [result] * 2, "messages[1].content[1].tool_use_id"), ([use] * 2, [result], "messages[0].content[1].id")):
        messages = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        status, made, _ = tools_server.post("/v1/messages", {"model": "toy", "max_tokens": 1, "messages": messages})
        assert (status, made["error"]["param"]) == (400, param), made
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "r"}
    for items, param in (([call, output, output], "input[2].call_id"), ([call, call, output], "input[1].call_id")):
        status, made, _ = tools_server.post("/v1/responses", {"model": "toy", "max_output_tokens": 1, "input": items})
        assert (status, made["error"]["param"]) == (400, param), made
    status, made, _ = tools_server.post("/v1/responses", {"model": "toy", "max_output_tokens": 1, "input": [call, output] * 2})
    assert status == 200, made


def test_two_tools_of_one_name_are_refused(tools_server: EdgeServer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    status, answer, _ = tools_server.post("/v1/chat/completions", {"messages": [USER], "tools": [tool, tool]})
    assert (status, answer["error"]["param"]) == (400, "tools[1].function.name") and "'weather'" in answer["error"]["message"]


def test_a_forced_tool_that_is_not_strict_is_held_to_what_can_be_kept(tools_server: EdgeServer, caplog: Any) -> None:
    """At every door, with a line for those who look."""
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}, "required": ["tags"], "propertyNames": {"type": "string"}}
    call = calling("rain", '{"tags": ["a"]}')
    with caplog.at_level("DEBUG", "vnext.server"):
        answer = ask(tools_server, call, tools=[tool_with(schema)], tool_choice="required")
    assert "tool 'rain'" in caplog.text and "properties.tags: the keyword 'uniqueItems' is not supported" in caplog.text
    constraint = request_of(tools_server, answer.id).sampling.constraint
    assert is_allowed(constraint, call) and is_allowed(constraint, calling("rain", '{"tags": ["a", "a"]}'))
    assert not is_allowed(constraint, calling("rain", "{}")) and not is_allowed(constraint, calling("rain", '{"tags": [1]}'))
    body = {"model": "toy", "max_tokens": 90, "messages": [{"role": "user", "content": f"say:{call}"}], "tool_choice": {"type": "any"}}
    status, made, _ = tools_server.post("/v1/messages", body | {"tools": [{"name": "rain", "input_schema": schema}]})
    assert (status, made["content"][0]["input"]) == (200, {"tags": ["a"]})
    function = {"type": "function", "name": "rain", "parameters": schema}
    body = {"model": "toy", "input": f"say:{call}", "tool_choice": "required"}
    for strict, expected in ((False, 200), (True, 400)):
        status, made, _ = tools_server.post("/v1/responses", body | {"tools": [function | {"strict": strict}]})
        assert status == expected, made
    assert "strict tool 'rain' cannot be kept at properties.tags" in made["error"]["message"]


def test_a_forced_tool_keeps_ids_of_64_bits(tools_server: EdgeServer) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer", "enum": [1234567890123456789, 2**63]}}, "required": ["id"]}
    call = calling("rain", '{"id": 1234567890123456789}')
    answer = ask(tools_server, call, tools=[tool_with(schema)], tool_choice="required")
    constraint = request_of(tools_server, answer.id).sampling.constraint
    assert is_allowed(constraint, call) and is_allowed(constraint, calling("rain", '{"id": 9223372036854775808}'))
    assert not any(is_allowed(constraint, calling("rain", f'{{"id": {each}}}')) for each in (1234567890123456768, 3, '"a"'))
