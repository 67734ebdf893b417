"""An agent over HTTP: ten turns of forced calls end in the right file, and no turn computes again what an earlier prompt had. Under
a template that expects reasoning, what is asked of answers holds from their first token where the model opens none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, serving

TEMPLATE = Path(__file__).with_name("agent_template.jinja")
LINES = [f"{turn}: {'ab' * (turn % 3)}" for turn in range(9)]
BLOCK = 16


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log")
    with serving(log, "--chat-template", str(TEMPLATE), "--block-size", str(BLOCK)) as running:
        yield running


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


# The demo model knows too little to write a file: each tool's schema says what to write.
WRITERS = [tool(f"write{place}", line={"const": line}) for place, line in enumerate(LINES)]
TOOLS = [*WRITERS, tool("finish", done={"const": True})]


class Turn:
    """One answer that must call the tool `name`, whole or streamed."""

    def __init__(self, server: Server, messages: list[dict[str, Any]], name: str, stream: bool, **body: Any) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id, messages=messages, tools=TOOLS, temperature=0, max_tokens=80,
                tool_choice={"type": "function", "function": {"name": name}}, extra_body=body, stream=stream,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )  # fmt: skip
            if stream:
                self._read([*answer])
            else:
                self.message = answer.choices[0].message.model_dump(exclude_none=True)
                self.finish, self.usage = answer.choices[0].finish_reason, answer.usage

    def _read(self, chunks: list[Any]) -> None:
        self.usage, self.finish = chunks[-1].usage, chunks[-2].choices[0].finish_reason
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        begun, *pieces = [call for delta in deltas for call in delta.tool_calls or []]
        assert begun.id and begun.function.arguments == "" and not any(piece.id for piece in pieces)
        function = {"name": begun.function.name, "arguments": "".join(piece.function.arguments for piece in pieces)}
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        self.message = {
            "role": "assistant",
            "content": "".join(delta.content or "" for delta in deltas),
            "tool_calls": [{"id": begun.id, "type": "function", "function": function}],
        } | ({"reasoning": thought} if thought else {})


@pytest.mark.parametrize(("stream", "thinks"), [(False, False), (True, False), (True, True)])
def test_ten_turns_of_calls(agent_server: Server, tmp_path: Path, stream: bool, thinks: bool) -> None:
    notes = tmp_path / "notes.txt"
    body = {"enable_thinking": True, "thinking_token_budget": 8} if thinks else {}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Write my notes. {stream} {thinks}"}]
    before = 0
    for name in [each["function"]["name"] for each in TOOLS]:
        turn = Turn(agent_server, messages, name, stream, **body)
        assert turn.finish == "stop", "a named call does not change the reason"
        assert bool(turn.message.get("reasoning")) == thinks and not turn.message.get("content")
        if thinks:
            assert 0 < turn.usage.completion_tokens_details.reasoning_tokens <= 8
        (call,) = turn.message["tool_calls"]
        assert call["function"]["name"] == name
        result = run_tool(notes, name, json.loads(call["function"]["arguments"]))
        messages += [turn.message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        cached = turn.usage.prompt_tokens_details.cached_tokens
        assert cached > before - BLOCK, "the earlier prompt is computed again"
        before = turn.usage.prompt_tokens
    assert notes.read_text() == "".join(f"{line}\n" for line in LINES) and result == "done"


def run_tool(notes: Path, name: str, arguments: dict[str, Any]) -> str:
    if name == "finish":
        return "done" if arguments == {"done": True} else "wrong"
    with notes.open("a") as file:
        file.write(f"{arguments['line']}\n")
    return "ok"


def test_required_calls_one_of_the_tools_and_says_so(agent_server: Server) -> None:
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(3):
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Go on"}], tools=TOOLS,
                tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=80,
            )  # fmt: skip
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            allowed = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in TOOLS}
            constants = {name: schema["const"] for name, schema in allowed[call.function.name].items()}
            assert json.loads(call.function.arguments) == constants


@pytest.mark.parametrize(("stored", "thinks"), [(True, False), (False, True)])
def test_ten_turns_of_calls_by_responses(agent_server: Server, tmp_path: Path, stored: bool, thinks: bool) -> None:
    """Each turn is a stream, and goes on from the stored one before, or sends all items again."""
    notes, before, previous = tmp_path / "notes.txt", 0, None
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    body = {"enable_thinking": True, "thinking_token_budget": 8} if thinks else {}
    items: list[Any] = [{"role": "user", "content": f"Write my notes. {stored} {thinks}"}]
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        for name in [each["name"] for each in tools]:
            with client.responses.stream(
                model=model, input=items, tools=tools, temperature=0, max_output_tokens=80, extra_body=body, store=stored,
                tool_choice={"type": "function", "name": name}, **({"previous_response_id": previous} if previous else {}),
            ) as stream:  # fmt: skip
                answer = stream.until_done().get_final_response()
            *thought, call = answer.output
            assert [item.type for item in thought] == ["reasoning"] * thinks
            assert 0 <= answer.usage.output_tokens_details.reasoning_tokens <= 8 * thinks
            result = run_tool(notes, name, json.loads(call.arguments))
            output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
            if stored:
                items, previous = [output], answer.id
            else:
                items += [*(item.model_dump(exclude_none=True) for item in answer.output), output]
            assert answer.usage.input_tokens_details.cached_tokens > before - BLOCK, "the earlier prompt is computed again"
            before = answer.usage.input_tokens
    assert notes.read_text() == "".join(f"{line}\n" for line in LINES) and result == "done"


def test_a_response_with_log_probabilities(agent_server: Server) -> None:
    """Those of a stream's deltas are those of the whole answer, and of the same answer as a chat."""
    asked = {"temperature": 0, "top_logprobs": 2}
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0) as client:
        model, words = client.models.list().data[0].id, "What is Python?"
        whole = client.responses.create(model=model, input=words, max_output_tokens=12, **asked).output[0].content[0]
        with client.responses.stream(model=model, input=words, max_output_tokens=12, **asked) as stream:
            deltas = [event for event in stream if event.type == "response.output_text.delta"]
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": words}], max_tokens=12, logprobs=True, **asked
        ).choices[0]
    assert "".join(entry.token for entry in whole.logprobs) == whole.text == chat.message.content
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in whole.logprobs]
    assert [entry.model_dump() for entry in whole.logprobs] == [entry.model_dump() for entry in chat.logprobs.content]
    assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs)


# ---- reasoning that may be left out -----------------------------------------------------------------------------------

CLOSING = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen 3's: it shows no mark unless reasoning is switched off."""
SCHEMA = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}, "place": {"type": "string", "maxLength": 8}},
    "required": ["rain", "place"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANY = {"type": "any", "disable_parallel_tool_use": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text(CLOSING)
    options = ("--chat-template", str(template), "--served-model-name", "demo", "--threads", "1")
    with serving(tmp_path_factory.mktemp("log"), *options) as running:
        yield running


def chat(thinker: Server, seed: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Is it wet?"}], "max_tokens": 120, "seed": seed} | fields
    answer = httpx.post(f"{thinker.url}/v1/chat/completions", json=body, timeout=120).json()
    return answer["choices"][0]


@pytest.mark.parametrize("budget", [None, 8])
def test_an_answer_is_held_to_what_was_asked(thinker: Server, budget: int | None) -> None:
    more = {} if budget is None else {"thinking_token_budget": budget}
    for seed in range(6):
        told = chat(thinker, seed, response_format=FORMAT, **more)
        assert told["finish_reason"] == "stop" and set(json.loads(told["message"]["content"])) == {"rain", "place"}
        chosen = chat(thinker, seed, structured_outputs={"choice": ["yes", "no"]}, **more)
        assert chosen["message"]["content"] in ("yes", "no") and chosen["finish_reason"] == "stop"
        matched = chat(thinker, seed, structured_outputs={"regex": "[0-9]{3}"}, **more)
        assert matched["message"]["content"].isdecimal() and len(matched["message"]["content"]) == 3
        called = chat(thinker, seed, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **more)
        assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
        either = chat(thinker, seed, tools=[TOOL], response_format=FORMAT, parallel_tool_calls=False, **more)
        arguments = [json.loads(call["function"]["arguments"]) for call in either["message"].get("tool_calls") or ()]
        assert arguments or set(json.loads(either["message"]["content"])) == {"rain", "place"}


def test_without_a_shape_it_says_what_it_would_without_a_budget(thinker: Server) -> None:
    texts = [chat(thinker, 3, temperature=0, **more)["message"]["content"] for more in ({}, {"thinking_token_budget": 4})]
    assert texts[0] == texts[1] and "</think>" not in texts[1]


def test_the_other_doors_hold_it_too(thinker: Server) -> None:
    format_ = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    body = {"model": "demo", "input": "Is it wet?", "max_output_tokens": 120, "text": {"format": format_}}
    answer = httpx.post(f"{thinker.url}/v1/responses", json=body, timeout=120).json()
    assert set(json.loads(answer["output"][-1]["content"][0]["text"])) == {"rain", "place"}
    message = {"model": "demo", "max_tokens": 120, "messages": [{"role": "user", "content": "Is it wet?"}]}
    tool = {"name": "weather", "input_schema": PARAMETERS}
    answer = httpx.post(
        f"{thinker.url}/v1/messages", json=message | {"tools": [tool], "tool_choice": ANY}, timeout=120
    ).json()
    assert answer["content"][0]["input"]["city"] in ("Rome", "Oslo") and answer["stop_reason"] == "tool_use"


def test_an_answer_says_which_message_lost_the_cache(agent_server: Server) -> None:
    """A clock in the system message, a rewritten turn, stripped history: the field's usual breakers, and what is none."""
    words = [f"word{number} and more of it, so that this message has several blocks of its own" for number in range(5)]

    def asked(*contents: str) -> dict[str, Any] | None:
        roles = ["system", *["user", "assistant"] * 4]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id, messages=messages, max_tokens=1, temperature=0, extra_body={"cache_salt": "own"},
            )
        assert answer.usage is not None
        return answer.usage.model_dump().get("cache_miss")

    assert asked(*words[:2]) is None and asked(*words[:4]) is None, "a talk that goes on"
    for place in (0, 1, 2):
        changed = [word.replace("more", "less") if number == place else word for number, word in enumerate(words[:4])]
        miss = asked(*changed)
        assert miss is not None and miss["reason"] == "changed" and miss["in"] == f"messages[{place}]"
        assert miss["lost_tokens"] >= BLOCK and miss["lost_tokens"] % BLOCK == 0
    assert "vnext_prefix_cache_lost_tokens_total{" in httpx.get(f"{agent_server.url}/metrics").text
