"""/v1/responses: OpenAI's package reads every answer and every event, and its requests become the chat they mean."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_origin, get_type_hints

import openai
import pytest
from edge_server import TOKENIZER, EdgeServer
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.context.openai_types import ChatBody
from vnext.server.responses.bodies import ResponsesBody
from vnext.server.responses.translation import SAME
from vnext.server.views.responses import RESPONSES
from vnext.state.events import unpack_tokens

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.description }}{{ tool.function.parameters.properties | tojson }}{% endfor %}"
    "<tool_call>{% endif %}{% if enable_thinking %}<think></think>{% endif %}"
    "{% for message in messages %}"
    "[{{ message.role }}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<{{ call.id }}:{{ call.function.name }}:{{ call.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files.", "format": {"type": "text"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
THOUGHT = "<think>Hm.</think>Yes"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MEMORY = 30_000


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE), responses_bytes_max=MEMORY) as running:
        yield running


def ask(server: EdgeServer, words: str, **options: Any) -> Response:
    return server.openai().responses.create(**{"model": "toy", "input": f"say:{words}"} | options)


def prompt(server: EdgeServer) -> str:
    return TOKENIZER.decode(unpack_tokens(server.engine.of_kind(SubmitRequest)[-1].prompt).tolist())


def events(server: EdgeServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream as it is on the wire, each event parsed by OpenAI's types."""
    status, text, _ = server.post("/v1/responses", {"model": "toy", "stream": True} | body)
    assert status == 200, text
    frames = [frame.split("\n") for frame in text.strip("\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in found]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    for event in found:
        EVENT.validate_python(event, strict=False)
    return found


def rebuilt(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream brings. Fails for an event that is out of order."""
    assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    stage, joined = "", ""
    for event in sent[2:-1]:
        kind, at = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert stage == "" and at == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            stage, joined = "added", ""
            continue
        assert at == len(items) - 1 and event.get("item_id", items[at]["id"]) == items[at]["id"]
        if kind == "output_item.done":
            assert stage == "done" and event["item"]["id"] == items[at]["id"]
            items[at], stage = event["item"], ""
        elif kind == "content_part.added":
            assert stage == "added" and event["part"]["text"] == ""
            stage = "open"
        elif kind == "content_part.done":
            assert stage == "said" and event["part"]["text"] == joined
            stage = "done"
        elif kind.endswith(".delta"):
            joined += event["delta"]
        else:
            [text] = [event[name] for name in ("text", "arguments", "input") if name in event]
            assert kind.endswith(".done") and text == joined
            stage = "said" if "text" in event else "done"
    assert stage == ""
    return items


def plain(items: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_whole_answer(server: EdgeServer) -> None:
    answer = ask(server, "Hello", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=400, user="u", temperature=0.5)
    assert answer.output_text == "Hello" and answer.status == "completed" and answer.model == "toy"
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"a": "b"}, "Be brief.", 0.5)
    assert prompt(server) == "[system]Be brief.[user]say:Hello"
    assert answer.usage.input_tokens == len(unpack_tokens(server.engine.of_kind(SubmitRequest)[-1].prompt)) and answer.usage.output_tokens > 0
    cut = ask(server, "Hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == ("incomplete", "max_output_tokens", "incomplete")
    assert ask(server, "").output[0].content[0].text == ""
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(server, "Hello" * 400)


@pytest.mark.parametrize(
    ("words", "more", "kinds"),
    [
        ("Hello", {}, ["message"]),
        ("", {}, ["message"]),
        (f"I look.{CALL}{CALL}", {"tools": [WEATHER]}, ["message", "function_call", "function_call"]),
        (f"{PATCHED}{CALL}", {"tools": [WEATHER, PATCH]}, ["custom_tool_call", "function_call"]),
        (THOUGHT, {"include": ["reasoning.encrypted_content"]}, ["reasoning", "message"]),
        (CALL, {"tools": [WEATHER], "max_output_tokens": 60}, ["function_call"]),
        (PATCHED, {"tools": [PATCH], "max_output_tokens": 60}, ["custom_tool_call"]),
    ],
)
def test_a_stream_brings_the_whole_answer_in_order(server: EdgeServer, words: str, more: dict[str, Any], kinds: list[str]) -> None:
    sent = events(server, {"input": f"say:{words}"} | more)
    last = sent[-1]["response"]
    assert sent[-1]["type"] == f"response.{last['status']}" and sent[0]["response"]["output"] == []
    assert rebuilt(sent) == last["output"] and [item["type"] for item in last["output"]] == kinds
    whole = ask(server, words, **more)
    assert plain(whole.model_dump(exclude_none=True)["output"]) == plain(
        Response.model_validate(last).model_dump(exclude_none=True)["output"]
    )
    assert (whole.status, whole.usage) == (last["status"], Response.model_validate(last).usage)
    if whole.status == "incomplete":
        return  # for which the package's helper raises
    with server.openai().responses.stream(model="toy", input=f"say:{words}", **more) as stream:
        assert stream.until_done().get_final_response().output_text == whole.output_text


def test_calls_and_their_outputs_follow_as_one_turn(server: EdgeServer) -> None:
    asked = ask(server, f"<think>Rain?</think>I look.{CALL}{PATCHED}", tools=[WEATHER, PATCH])
    thought, words, call, patch = asked.output
    assert (call.name, json.loads(call.arguments), patch.name, patch.input) == ("weather", {"city": "Köln"}, "patch", "*** Begin\n+a")
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": [{"type": "input_text", "text": "done"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "so"}]},
    ]
    turn = (
        f'[assistant](Rain?)I look.<{call.call_id}:weather:{{"city": "Köln"}}><{patch.call_id}:patch:{{"input": "*** Begin\\n+a"}}>'
        f"[tool {call.call_id}]rain[tool {patch.call_id}]done[user]so"
    )
    given = [{"role": "user", "content": "Rain?"}, *(item.model_dump(exclude_none=True) for item in asked.output), *outputs]
    ask(server, "", input=given, tools=[WEATHER, PATCH], max_output_tokens=1)
    assert prompt(server).endswith(f"[user]Rain?{turn}")
    ask(server, "", input=outputs, previous_response_id=asked.id, tools=[WEATHER, PATCH], max_output_tokens=1)
    assert prompt(server).endswith(turn)
    opaque = ask(server, THOUGHT, include=["reasoning.encrypted_content"], store=False).output[0]
    ask(server, "", input=[{"type": "reasoning", "summary": [], "encrypted_content": opaque.encrypted_content}], max_output_tokens=1)
    assert prompt(server) == "[assistant](Hm.)"


def test_every_tool_choice(server: EdgeServer) -> None:
    tools = [WEATHER, PATCH, {"type": "web_search", "external_web_access": False}]
    for choice in (
        "required",
        {"type": "function", "name": "weather"},
        {"type": "custom", "name": "patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ):
        answer = ask(server, CALL, tools=tools, tool_choice=choice)
        assert server.engine.of_kind(SubmitRequest)[-1].sampling.constraint.grammar
        assert [tool.type for tool in answer.tools] == ["function", "custom", "web_search"]
    assert ask(server, CALL, tools=tools, tool_choice="none").output[0].type == "message"
    assert "web_search" not in prompt(server)
    both = ask(server, CALL + CALL, tools=tools, parallel_tool_calls=False)
    assert [item.type for item in both.output] == ["function_call"]
    regex = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    lark = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
    ask(server, "", tools=[regex], max_output_tokens=1)
    assert '"pattern": "^(?:a+)$"' in prompt(server)
    ask(server, "", tools=[lark], max_output_tokens=1)
    assert 'start: "a"' in prompt(server)


def test_tools_in_a_namespace(server: EdgeServer) -> None:
    """As Codex offers them: to the model the namespace is a part of the name."""
    tools = [WEATHER, {"type": "namespace", "name": "crm", "description": "d", "tools": [WEATHER, PATCH]}]
    calls = CALL.replace('"weather"', '"crm__weather"') + PATCHED.replace('"patch"', '"crm__patch"')
    answer = ask(server, calls, tools=tools)
    assert [(item.type, item.name, item.namespace) for item in answer.output] == [
        ("function_call", "weather", "crm"),
        ("custom_tool_call", "patch", "crm"),
    ]
    items = [item.model_dump(exclude_none=True) for item in answer.output[:1]]
    rain = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "rain"}
    ask(server, "", input=[*items, rain], tools=[WEATHER], max_output_tokens=1)
    id_ = answer.output[0].call_id
    assert prompt(server).endswith(f'<{id_}:crm__weather:{{"city": "Köln"}}>[tool {id_}]rain')
    ask(server, CALL, tools=tools, tool_choice={"type": "function", "name": "patch", "namespace": "crm"})
    assert server.engine.of_kind(SubmitRequest)[-1].sampling.constraint.grammar


def test_instructions_at_the_beginning_are_one_message(server: EdgeServer) -> None:
    says = [{"role": role, "content": role[0]} for role in ("developer", "system", "user", "developer")]
    ask(server, "", input=says, instructions="i", max_output_tokens=1)
    assert prompt(server) == "[system]i\n\nd\n\ns[user]u[system]d"


class City(BaseModel):
    name: str


def test_a_schema_is_kept_by_the_engine(server: EdgeServer) -> None:
    parsed = server.openai().responses.parse(model="toy", input='say:{"name":"Köln"}', text_format=City)
    assert parsed.output_parsed == City(name="Köln")
    assert server.engine.of_kind(SubmitRequest)[-1].sampling.constraint.grammar
    ask(server, "{}", text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert server.engine.of_kind(SubmitRequest)[-1].sampling.constraint.grammar


def test_log_probabilities_of_the_words(server: EdgeServer) -> None:
    """The fake engine has none to report, so each token's entry is empty of alternatives."""
    for more in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}):
        ask(server, "Hi", **more)
        asked = server.engine.of_kind(SubmitRequest)[-1].sampling
        assert asked.logprobs == more.get("top_logprobs", 0)
    assert ask(server, "Hi").output[0].content[0].logprobs == []


def test_stored_responses(server: EdgeServer) -> None:
    client = server.openai()
    first = ask(server, "One", instructions="Be brief.")
    second = ask(server, "Two", previous_response_id=first.id)
    assert prompt(server) == "[user]say:One[assistant]One[user]say:Two", "instructions are those of one response"
    assert client.responses.retrieve(second.id) == second
    items = client.responses.input_items.list(second.id)
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", "say:Two")] and not items.has_more
    several = ask(server, "", input=[{"role": "user", "content": text} for text in "abc"], max_output_tokens=1)
    page = client.responses.input_items.list(several.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["c", "b"] and page.has_more
    later = client.responses.input_items.list(several.id, after=page.data[-1].id)
    assert [item.content[0].text for item in later.data] == ["a"]
    client.responses.delete(first.id)
    ask(server, "Three", previous_response_id=second.id)
    assert prompt(server) == "[user]say:One[assistant]One[user]say:Two[assistant]Two[user]say:Three"
    for gone in (first.id, ask(server, "x", store=False).id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="Send its items as input") as caught:
            ask(server, "x", previous_response_id=gone)
        assert caught.value.code == "previous_response_not_found"


def test_the_store_is_bounded(server: EdgeServer) -> None:
    client = server.openai()
    kept, dropped = ask(server, "a" * 300), ask(server, "a")
    for _ in range(25):
        last = ask(server, "b" * 300)
        assert client.responses.retrieve(kept.id).id == kept.id, "what is asked for stays"
    assert client.responses.retrieve(last.id).id == last.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(dropped.id)
    store = server.app[RESPONSES]
    assert 0 < store.size_bytes <= MEMORY and store.size_bytes == sum(each.size_bytes for each in store._kept.values())


def test_tools_that_no_one_here_runs_are_left_out(server: EdgeServer) -> None:
    hosted = [{"type": kind} for kind in ("image_generation", "tool_search", "local_shell", "shell", "apply_patch", "web_search")]
    only = {"type": "allowed_tools", "mode": "auto"}
    for tools, choice in (
        (hosted, "auto"),
        ([*hosted, WEATHER], "auto"),
        ([*hosted, WEATHER], only | {"tools": [{"type": "shell"}, {"type": "function", "name": "weather"}]}),
        ([*hosted, WEATHER], only | {"tools": [{"type": "shell"}]}),
    ):
        answer = ask(server, "Hi", tools=tools, tool_choice=choice)
        assert answer.output_text == "Hi" and [tool.type for tool in answer.tools] == [tool["type"] for tool in tools]
        assert not any(tool["type"] in prompt(server) for tool in hosted)
    assert ask(server, CALL, tools=[*hosted, WEATHER], tool_choice="required").output[0].name == "weather"


def test_an_item_may_be_named_in_place_of_itself(server: EdgeServer) -> None:
    first = ask(server, f"{THOUGHT}{CALL}", tools=[WEATHER])
    names = [{"type": "item_reference", "id": item.id} for item in first.output]
    [asked] = server.openai().responses.input_items.list(first.id).data
    call = next(item for item in first.output if item.type == "function_call")
    rest = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = ask(server, "", input=[{"id": asked.id}, *names, *rest], max_output_tokens=1)
    named = prompt(server)
    ask(server, "", previous_response_id=first.id, input=rest, max_output_tokens=1)
    assert named == prompt(server) and "(Hm.)" in named and "<tool_call>" not in named.split("[tool")[1]
    ask(server, "", previous_response_id=second.id, input="more", max_output_tokens=1)
    assert prompt(server).startswith(named)
    size, _, _ = server.post("/v1/responses/input_tokens", {"input": [*names, *rest]})
    assert size == 200
    for again in (asked.id, f"{first.id}_00", f"{first.id}_\u0660"):  # a few bytes would stand for all that is stored
        status, answer, _ = server.post("/v1/responses", {"input": [{"id": asked.id}, *names, {"id": again}, *rest]})
        assert status == 400 and f"the item {again!r} is in the input already" in answer["error"]["message"]
    server.openai().responses.delete(first.id)
    status, answer, _ = server.post("/v1/responses", {"input": names})
    assert status == 400 and answer["error"]["param"] == "input[0].id"


def test_a_history_that_another_server_began_is_read(server: EdgeServer) -> None:
    foreign = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "call_id": "c", "output": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "files"},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit"}}]},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "x"}},
        {"type": "tool_search_call", "call_id": "c", "arguments": {"goal": "x"}},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA-_"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA-_=="},
    ]
    said = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "say:c"}]
    ask(server, "", input=[{"role": "user", "content": "a"}, *foreign, *said])
    assert prompt(server) == "[user]a[assistant]b[user]say:c"
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA-_=="}
    ask(server, "", input=[{"role": "user", "content": "a"}, summed, *said])
    assert prompt(server) == "[user]a[assistant](Hm.)b[user]say:c"


def test_a_stored_call_needs_its_result_unless_it_was_cut(server: EdgeServer) -> None:
    whole, cut = (ask(server, CALL, tools=[WEATHER], max_output_tokens=count) for count in (400, 50))
    assert cut.status == "incomplete" and cut.output[-1].type == "function_call"
    with pytest.raises(openai.BadRequestError, match="previous_response_id: the call '.*' has no result behind it"):
        ask(server, "", previous_response_id=whole.id, input="and?")
    ask(server, "", previous_response_id=cut.id, input="and?", max_output_tokens=1)
    assert prompt(server).endswith("[user]and?")


def test_probes_pass(server: EdgeServer) -> None:
    ask(server, "", input="", max_output_tokens=1)
    assert prompt(server) == "[user]"
    assert ask(server, "a", truncation="auto").truncation == "auto"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(server, "Hello" * 400, truncation="auto")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type is 'input_image'"),
    ({"input": [{"type": "function_cal"}]}, "input[0].type is 'function_cal'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id: there is no item 'msg_1' here"),
    ({"input": [{"id": "msg_1"}]}, "input[0].id: there is no item 'msg_1' here"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id: there is no item"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": {}}]}, "input[0].output is an object"),
    ({"input": [{"role": "user"}]}, "input[0].content is missing"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "no call_id or no name"),
    ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input is missing"),
    ({"input": []}, "input is missing"),
    ({"input": None}, "input is missing"),
    ({"input": 5}, "input is wrong"),
    ({"tools": [{"type": "file_search"}]}, "runs at OpenAI"),
    ({"tools": [{"type": "function"}]}, "tools[0].name is missing"),
    ({"tools": [{"type": "shell"}, WEATHER, PATCH, WEATHER]}, "tools[3].name is 'weather': an earlier tool has this name too"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [PATCH, PATCH]}]}, "tools[0].tools[1].name is 'a__patch'"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id is missing"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "x", "output": "a"}]}, "input[0].call_id is 'x': no call before it"),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}, {"role": "user", "content": "b"}]},
        "input[0].call_id: the call 'x' has no result behind it",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice must be"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "nope"}}, "not among tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type is 'xml'"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema is missing"),
    ({"tools": [{"type": "shell"}], "tool_choice": {"type": "shell"}}, "tool_choice asks for a call of 'shell'"),
    ({"tools": [{"type": "shell"}], "tool_choice": "required"}, "tool_choice asks for a call of 'shell'"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}},
        "tool_choice asks for a call of 'web_search'",
    ),
    ({"truncation": "middle"}, "truncation is 'middle'"),
    ({"background": True, "store": False}, "background is true and store is false"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"prompt": {"id": "p"}}, "prompt is not supported"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages is not supported"),
    ({"top_logprobs": 30}, "top_logprobs"),
    ({"max_output_tokens": -1}, "max_output_tokens is -1"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0: it must be at least 1."),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "wrong"}}}}, "text.format.schema cannot be kept"),
    ({"input": "a" * 3000}, "Please reduce the length of the input or completion."),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("more", "sentence"), WRONG)
def test_a_wrong_body_gets_one_sentence(server: EdgeServer, more: dict[str, Any], sentence: str) -> None:
    status, answer, _ = server.post("/v1/responses", {"model": "toy", "input": "a"} | more)
    assert status == 400 and sentence in answer["error"]["message"], answer


def test_fields_that_it_shares_with_chats_have_their_types() -> None:
    mine, theirs = get_type_hints(ResponsesBody), get_type_hints(ChatBody)
    wider = {name for name in SAME if get_origin(theirs[name]) is not UnionType}  # a chat has a default in place of None
    assert {name: mine[name] for name in SAME if name not in wider} == {name: theirs[name] for name in SAME if name not in wider}
    assert {name: mine[name] for name in wider} == {name: theirs[name] | None for name in wider}


def test_options_names_the_methods_of_its_path_alone(server: EdgeServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("OPTIONS", "/v1/responses/input_tokens")
    assert connection.getresponse().headers["Allow"] == "POST"
    connection.close()


def test_a_stream_that_fails_ends_with_its_reason(server: EdgeServer) -> None:
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="no room for 5 tokens"):
        client.responses.create(model="toy", input="refuse me", stream=True)


def test_a_number_of_more_than_64_bits_in_a_call_is_kept(server: EdgeServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": {"number": 10**30}}
    result = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    made = ask(server, "", input=[call, result, {"role": "user", "content": "say:a"}])
    assert ask(server, "b", previous_response_id=made.id).output_text == "b" and str(10**30) in prompt(server)


def test_what_vllm_adds_binds_the_answer(server: EdgeServer) -> None:
    given = {"bad_words": ["no"], "allowed_token_ids": [3, 4], "min_tokens": 2, "stop_token_ids": [9], "structured_outputs": {"choice": ["a"]}}
    ask(server, "a", extra_body=given)
    asked = server.engine.of_kind(SubmitRequest)[-1].sampling
    assert asked.constraint.banned and asked.constraint.allowed == (3, 4) and asked.constraint.grammar
    assert asked.min_tokens == 2 and 9 in asked.stop_token_ids
    text = {"format": {"type": "json_object"}}
    for words, extra in (
        ("structured_outputs.* and text.format|text.format and structured_outputs", {"text": text, "structured_outputs": {"choice": ["a"]}}),
        ("bad_words", {"bad_words": [""]}),
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(server, "a", extra_body=extra)
