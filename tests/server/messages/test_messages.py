"""/v1/messages: Anthropic's package reads every answer and every event, and its requests become the chat they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import RawMessageStreamEvent
from edge_server import TOKENIZER, EdgeServer
from pydantic import TypeAdapter
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.messages.bodies import CountTokensBody
from vnext.server.messages.translation import chat_body
from vnext.state.events import unpack_tokens
from vnext.state.params import ALL_TOKENS

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% if enable_thinking %}<think></think>{% endif %}"
    "{% for message in messages %}"
    "[{{ message.role }}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}<{{ call.id }}:{{ call.function.name }}:{{ call.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
USE = ("tool_use", '{"city": "Köln"}')
SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.5}
EVENT = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE)) as running:
        yield running


def client(server: EdgeServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **({"api_key": "none", "max_retries": 0} | options))


def ask(server: EdgeServer, words: str, **options: Any) -> anthropic.types.Message:
    body = {"model": "toy", "max_tokens": 400, "messages": [{"role": "user", "content": f"say:{words}"}]} | options
    return client(server).messages.create(**body)


def last_request(server: EdgeServer) -> SubmitRequest:
    return server.engine.of_kind(SubmitRequest)[-1]


def prompt(server: EdgeServer) -> str:
    return TOKENIZER.decode(unpack_tokens(last_request(server).prompt).tolist())


def events(server: EdgeServer, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The stream as it is on the wire."""
    status, text, _ = server.post("/v1/messages", {"model": "toy", "max_tokens": 400, "stream": True} | body)
    assert status == 200, text
    frames = [frame.split("\n") for frame in text.strip("\n").split("\n\n")]
    assert all(len(frame) == 2 and frame[0].startswith("event: ") for frame in frames), text
    return [(name[7:], json.loads(data.removeprefix("data: "))) for name, data in frames]


def rebuilt(sent: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The blocks that a stream brings. Fails for an event that is out of order."""
    names = [name for name, _ in sent]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"], names
    blocks: list[dict[str, Any]] = []
    is_open = False
    for name, event in sent[2:-2]:
        assert name == event["type"]
        if name == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "joined": ""})
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if name == "content_block_stop":
            is_open = False
            continue
        kind = event["delta"]["type"]
        expected = {"text": ["text_delta"], "tool_use": ["input_json_delta"], "thinking": ["thinking_delta", "signature_delta"]}
        assert kind in expected[blocks[-1]["type"]]
        if kind != "signature_delta":
            blocks[-1]["joined"] += next(value for key, value in event["delta"].items() if key != "type")
    assert not is_open
    return blocks


def test_a_whole_answer(server: EdgeServer) -> None:
    answer = ask(server, "Hello", system="Be brief.", stop_sequences=["lo"], extra_body=SAMPLING)
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "stop_sequence", "lo")
    assert [block.text for block in answer.content] == ["Hel"] and answer.model == "toy"
    assert prompt(server) == "[system]Be brief.[user]say:Hello"
    assert last_request(server).sampling.top_k == 3
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(unpack_tokens(last_request(server).prompt))
    assert usage.output_tokens > 0
    assert ask(server, "Hello").stop_reason == "end_turn"
    assert ask(server, "Hello", max_tokens=2).stop_reason == "max_tokens"
    assert ask(server, "Hello", max_tokens=20_000).stop_reason == "end_turn"
    full = ask(server, "Hello", max_tokens=20_000, messages=[{"role": "user", "content": "a"}])
    assert full.stop_reason == "model_context_window_exceeded", "more than the model has means all that fit"
    for words in ("Hello" * 400, "Hello" * 4000, "x" * 10**6):
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: (\d+) tokens > (\d+) maximum") as caught:
            ask(server, words)
        count, most = map(int, re.findall(r"\d+", caught.value.body["error"]["message"]))
        assert count > most == server.context.bounds.model_length - 1
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(server, "", messages=[{"role": "user", "content": ""}] * 2000)


def test_a_call_and_its_result(server: EdgeServer) -> None:
    asked = ask(server, f"I look.{CALL}", tools=[WEATHER], tool_choice={"type": "auto"})
    assert asked.stop_reason == "tool_use"
    text, use = asked.content
    assert (text.text, use.name, use.input) == ("I look.", "weather", {"city": "Köln"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}], "is_error": True}
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}}]},
    ]
    ask(server, "", messages=turns, tools=[WEATHER], max_tokens=1)
    id_ = use.id.removeprefix("toolu_")
    assert re.fullmatch("[0-9a-z]{9}", id_), "the only ids that Mistral's templates take"
    call = f'<{id_}:weather:{{"city": "Köln"}}>'
    assert prompt(server).endswith(f"[user]Rain?[assistant]I look.{call}[tool {id_}]Error: rain[user]so")
    one = ask(server, CALL + CALL, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["tool_use"]
    cut = ask(server, CALL, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in cut.content] == ["text"]


def test_thinking_goes_to_a_block_of_its_own_and_comes_back(server: EdgeServer) -> None:
    words, thinking = "<think>Hm.</think>Yes", {"type": "enabled", "budget_tokens": 1024}
    answer = ask(server, words, thinking=thinking)
    thought, text = answer.content
    assert (thought.thinking, text.text, bool(thought.signature)) == ("Hm.", "Yes", True)
    assert prompt(server).startswith("<think></think>")
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thought.model_dump(), {"type": "redacted_thinking", "data": "x"}, text.model_dump()]},
        {"role": "user", "content": "b"},
    ]
    ask(server, "", messages=turns, max_tokens=1)
    assert prompt(server) == "[user]a[assistant](Hm.)Yes[user]b", "disabled: the template does not begin to think"
    assert [block.type for block in ask(server, words).content] == ["text"]


def test_the_engine_enforces_a_budget_of_thinking() -> None:
    without = TEMPLATE.replace("<think></think>", "")
    thinking = without + "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    for source, budget in ((thinking, 1024), (without, None)):
        with EdgeServer(byte_level(source)) as server:
            ask(server, "Hm.</think>Yes", thinking={"type": "enabled", "budget_tokens": 1024})
            constraint = last_request(server).sampling.constraint
            assert constraint is None if budget is None else constraint.reasoning_max == budget
            ask(server, "Hm.</think>Yes", thinking={"type": "adaptive"})
            assert last_request(server).sampling.constraint is None


@pytest.mark.parametrize(
    ("words", "more", "expected", "reason"),
    [
        ("Hello", {}, [("text", "Hello")], "end_turn"),
        ("", {}, [], "end_turn"),
        (f"I look.{CALL}{CALL}", {"tools": [WEATHER]}, [("text", "I look."), USE, USE], "tool_use"),
        ("<think>Hm.</think>Yes", {"thinking": {"type": "adaptive"}}, [("thinking", "Hm."), ("text", "Yes")], "end_turn"),
    ],
)
def test_a_stream_brings_the_same_in_order(
    server: EdgeServer, words: str, more: dict[str, Any], expected: list[tuple[str, str]], reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": f"say:{words}"}]} | more
    sent = events(server, body)
    for _, event in sent:
        if event["type"] != "ping":
            EVENT.validate_python(event, strict=False)
    assert [(block["type"], block["joined"]) for block in rebuilt(sent)] == expected
    assert sent[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": None}
    assert sent[-2][1]["usage"]["output_tokens"] > 0 and sent[0][1]["message"]["content"] == []
    with client(server).messages.stream(model="toy", max_tokens=400, **body) as stream:
        final = stream.get_final_message()
    whole = ask(server, words, **more)
    kept = [block.model_dump(exclude={"id"}, exclude_none=True) for block in whole.content]
    drop = {"id", "parsed_output"}
    assert [block.model_dump(exclude=drop, exclude_none=True) for block in final.content] == kept
    assert (final.stop_reason, final.usage.input_tokens) == (whole.stop_reason, whole.usage.input_tokens)


def test_an_answer_that_the_client_begins(server: EdgeServer) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "say:Once"}]
    assert ask(server, "", messages=turns).content[0].text == "Once"
    assert prompt(server).endswith("[assistant]say:Once")


def test_the_count_of_tokens_is_that_of_the_prompt(server: EdgeServer) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "say:a"}], "system": "Be brief.", "tools": [WEATHER]}
    counted = client(server).messages.count_tokens(**body)
    ask(server, "a", **body)
    assert counted.input_tokens == len(unpack_tokens(last_request(server).prompt))


def test_the_fields_of_claude_code_pass(server: EdgeServer) -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"}
    system = [header, {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}]
    body = {
        "model": "toy", "max_tokens": 400, "system": system, "metadata": {"user_id": "u"}, "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "say:a"}]}],
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,of-tomorrow-2099"}
    status, answer, sent = server.post("/v1/messages?beta=true", body, **headers)
    assert status == 200 and answer["content"] == [{"type": "text", "text": "a"}] and sent["X-Request-Id"]
    assert prompt(server) == "<think></think>[system]You are an agent.[user]say:a"


def test_a_schema_is_kept_by_the_engine(server: EdgeServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": shape}}, {"extra_body": {"output_format": shape}}):
        ask(server, '{"a":1}', **more)
        assert last_request(server).sampling.constraint.grammar
    ask(server, "a")
    assert last_request(server).sampling.constraint is None


def test_the_small_print(server: EdgeServer) -> None:
    """Ids have Anthropic's prefixes, and every answer, stream and error its header."""
    whole = client(server).messages.with_raw_response.create(
        model="toy", max_tokens=400, messages=[{"role": "user", "content": f"say:{CALL}"}], tools=[WEATHER]
    )
    answer = whole.parse()
    assert answer.id.startswith("msg_") and answer.content[0].id.startswith("toolu_")
    assert whole.headers["request-id"] == whole.headers["x-request-id"] == answer._request_id
    _, _, streamed = server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "stream": True})
    assert streamed["request-id"] == streamed["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(server, "a", model="claude-of-tomorrow")
    assert caught.value.request_id == caught.value.body["request_id"]
    _, _, chat = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert chat["request-id"] is None


def test_models_have_anthropic_s_shape_for_its_clients(server: EdgeServer) -> None:
    listed = client(server).models.list()
    assert [model.id for model in listed.data] == ["toy", "other-name"] and listed.data[0].type == "model"
    assert listed.data[0].display_name == "toy" and listed.data[0].created_at.year > 2020
    assert (listed.first_id, listed.last_id, listed.has_more) == ("toy", "other-name", False)
    assert client(server).models.retrieve("other-name").id == "other-name"
    first = client(server).models.list(limit=1)
    assert [model.id for model in first.data] == ["toy"] and first.has_more
    assert [model.id for model in client(server).models.list(limit=1)] == ["toy", "other-name"], "its package asks for each page"
    assert [model.id for model in client(server).models.list(before_id="other-name").data] == ["toy"]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client(server).models.retrieve("nope")
    with pytest.raises(anthropic.BadRequestError, match="limit is '0'"):
        client(server).models.list(limit=0)
    assert "object" in server.get("/v1/models")[1], "all others get OpenAI's"


def test_tools_that_the_client_runs_are_functions(server: EdgeServer) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    answer = ask(server, call, tools=tools[:1])
    assert (answer.content[0].name, answer.content[0].input) == ("bash", {"command": "ls"})
    body = msgspec.convert({"messages": [], "tools": tools}, CountTokensBody)
    shown = {tool.function.name: msgspec.to_builtins(tool.function) for tool in chat_body(body, False).tools}
    assert list(shown) == [tool["name"] for tool in tools] and all(tool["description"] for tool in shown.values())
    commands = {name: tool["parameters"]["properties"]["command"].get("enum") for name, tool in shown.items()}
    assert commands["bash"] is None and "undo_edit" in commands["str_replace_editor"]
    assert commands["str_replace_based_edit_tool"] == ["view", "create", "str_replace", "insert"] and "rename" in commands["memory"]


def test_blocks_that_are_no_text_of_the_client(server: EdgeServer) -> None:
    """Documents are read, an image and a PDF leave a word, and what ran at Anthropic is passed over."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    documents = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}, image]}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
        {"type": "search_result", "source": "http://a.example", "title": "S", "content": [{"type": "text", "text": "three"}]},
    ]
    ran = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2", "content": {"type": "web_fetch_tool_result_error"}},
    ]
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    turns = [
        {"role": "user", "content": [*documents, image]},
        {"role": "assistant", "content": ran},
        {"role": "assistant", "content": [*ran, {"type": "text", "text": "found"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}]},
        {"role": "user", "content": "say:a"},
    ]
    assert ask(server, "", messages=turns).content[0].text == "a"
    an_image = "[An image was here. This model reads text only.]"
    a_file = "[A file was here. This model reads text only.]"
    assert prompt(server) == (
        f"[user]T\none\ntwo\n{an_image}\n{a_file}\nS\nhttp://a.example\nthree\n{an_image}"
        f"[assistant]found<1:weather:{{}}>[tool 1]{an_image}[user]say:a"
    )


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [CALLED, {"role": "user", "content": [RESULT | {"tool_use_id": "b"}]}]},
        "messages[1].content[0].tool_use_id is 'b': no call before it has this id",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id is missing"),
    ({"messages": [CALLED, {"role": "user", "content": "b"}]}, "messages[0].content[0].id: the call 'a' has no result behind it"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name is 'weather'"),
    ({"stop_sequences": [""]}, "stop_sequences holds a string of 0 characters"),
    ({"stop_sequences": ["a"] * 300}, "stop_sequences has 300 entries"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format.schema cannot be kept"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, "output_format.schema cannot be kept"),
    ({"output_format": {"type": "xml"}}, "output_format must be"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}, "The last message's text is not in"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]}, "messages[0].content[0].type is 'video'"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].source is no document"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": {}}]}]},
        "messages[0].content[0].content is an object",
    ),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "answers with images"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role is 'tool'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "no id or no name"),
    ({"messages": []}, "empty list"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs at Anthropic"),
    ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice.type is 'all'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}}, "not among tools"),
    ({"thinking": {"type": "loud"}}, "thinking.type is 'loud'"),
    ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"max_tokens": "many"}, "max_tokens is wrong"),
    ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1."),
    ({"system": 5}, "system is wrong"),
]


@pytest.mark.parametrize(("more", "sentence"), WRONG)
def test_a_wrong_body_gets_one_sentence_in_anthropic_s_shape(server: EdgeServer, more: dict[str, Any], sentence: str) -> None:
    body = {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]} | more
    status, answer, _ = server.post("/v1/messages", body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), answer
    assert sentence in answer["error"]["message"]
    with pytest.raises(anthropic.BadRequestError):
        client(server).post("/v1/messages", body=body, cast_to=object)


def test_other_errors_have_their_types(server: EdgeServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        ask(server, "a", model="claude-of-tomorrow")
    status, answer, _ = server.post("/v1/messages", b"{")
    assert status == 400 and answer["type"] == "error"
    status, answer, _ = server.get("/v1/messages")
    assert status == 405 and answer["type"] == "error"
    with EdgeServer(byte_level(TEMPLATE), api_keys=("secret",)) as closed:
        assert ask_with(closed, api_key="secret") == ask_with(closed, auth_token="secret", api_key=None) == "a"
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            ask_with(closed, api_key="wrong")


def ask_with(server: EdgeServer, **options: Any) -> str:
    body = {"model": "toy", "max_tokens": 5, "messages": [{"role": "user", "content": "say:a"}]}
    return client(server, **options).messages.create(**body).content[0].text


MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def kept(server: EdgeServer, **options: Any) -> list[tuple[str, int]]:
    """The texts that a request asks to keep, and for how long."""
    ask(server, "one", **options)
    tokens = unpack_tokens(last_request(server).prompt).tolist()
    retention = last_request(server).sampling.retention
    return [("all" if count == ALL_TOKENS else TOKENIZER.decode(tokens[:count]), seconds) for count, seconds in retention]


def test_a_breakpoint_keeps_what_stands_before_it(server):
    system = [{"type": "text", "text": "You are an agent.", **HOUR}]
    first = {"role": "user", "content": [{"type": "text", "text": "xylophone"}]}
    last = {"role": "user", "content": [{"type": "text", "text": "say:one", **MARK}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yes", **MARK}]}
    assert kept(server) == [] and kept(server, cache_control=MARK["cache_control"]) == [("all", 300)]
    assert kept(server, messages=[first, answer, last]) == [("all", 300)], "the last one covers the first"
    found = kept(server, system=system, messages=[first, last])
    assert found == [("all", 300), ("[system]You are an agent.[user]", 3600)]
    assert kept(server, system=system, messages=[first]) == [("[system]You are an agent.[user]", 3600)]
    tools = [WEATHER | HOUR]
    (text, seconds), = kept(server, tools=tools, messages=[first])
    assert seconds == 3600 and "weather" in text and text.endswith("[user]")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "fine", **MARK}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]}
    assert kept(server, messages=[first, call, {"role": "user", "content": [result]}]) == [("all", 300)]


def test_usage_says_what_is_kept(server):
    usage = ask(server, "one", cache_control=MARK["cache_control"]).usage
    length = len(unpack_tokens(last_request(server).prompt))
    assert (usage.input_tokens, usage.cache_creation_input_tokens + usage.cache_read_input_tokens) == (0, length)
    usage = ask(server, "one").usage
    assert usage.cache_creation_input_tokens == 0 and usage.input_tokens + usage.cache_read_input_tokens == length


@pytest.mark.parametrize(("control", "why"), [
    ({"type": "eternal"}, "cache_control.type is 'eternal': it must be 'ephemeral'"),
    ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl is '2h': it must be '5m' or '1h'"),
    ({"type": "ephemeral", "ttl": "-5m"}, "cache_control.ttl is '-5m'"),
])  # fmt: skip
def test_unknown_times_are_refused(server, control, why):
    content = [{"type": "text", "text": "say:one", "cache_control": control}]
    with pytest.raises(anthropic.BadRequestError, match=why):
        ask(server, "one", messages=[{"role": "user", "content": content}])


TURNS = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('users and assistants take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_a_template_that_wants_turns_gets_them() -> None:
    """Two results and words behind them, a system's message in the middle, and two turns of one role."""
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"} for name in ("a", "b")]
    calls = [{"type": "tool_use", "id": name, "name": "weather", "input": {}} for name in ("a", "b")]
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "say:three"}]},
        {"role": "system", "content": "later"},
    ]
    with EdgeServer(byte_level(TURNS)) as server:
        ask(server, "", system="first", messages=turns)
        shown = prompt(server)
        start, rest = shown.split("[assistant]")
        assert start == "[user]first\n\nlater\n\none\n\ntwo"
        answers = [f"<tool_response>\nof {name}\n</tool_response>" for name in ("a", "b")]
        assert rest.split("[user]")[1] == "\n\n".join([*answers, "say:three"])
        counted = client(server).messages.count_tokens(model="toy", system="first", messages=turns)
        assert counted.input_tokens == len(unpack_tokens(last_request(server).prompt))
