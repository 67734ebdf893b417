"""The official anthropic client against the real server: thinking, counts, schemas, tools, its own loop of calls, errors.

The demo model knows little: calls are forced, and their texts are bounded by the schemas of the tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from serving import Server, serving

TEMPLATE = Path(__file__).with_name("agent_template.jinja")
USER = {"role": "user", "content": "What does len do?"}
ANY = {"type": "any", "disable_parallel_tool_use": True}
THINKING = {"type": "enabled", "budget_tokens": 12}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "note": {"type": "string", "maxLength": 12}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city.", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["small", "large"]
    is_capital: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--chat-template", str(TEMPLATE), "--served-model-name", "demo", "--threads", "1", "--api-key", "secret"]
    with serving(tmp_path_factory.mktemp("log"), *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from anthropic import Anthropic  # by the process that runs these tests alone

    return Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 150, "messages": [USER], "extra_body": {"temperature": 0}} | more


def shown(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message without what differs between two answers of the same words."""
    return [block.model_dump(exclude={"id", "parsed_output"}, exclude_none=True) for block in message.content]


@pytest.mark.parametrize(
    ("more", "kinds", "reason"),
    [
        ({}, ["text"], "end_turn"),
        ({"max_tokens": 3}, ["text"], "max_tokens"),
        ({"thinking": THINKING}, ["thinking", "text"], "end_turn"),
        ({"tools": [WEATHER, NOW], "tool_choice": {"type": "tool", "name": "weather"}}, ["tool_use"], "tool_use"),
        ({"tools": [WEATHER], "tool_choice": ANY, "thinking": THINKING}, ["thinking", "tool_use"], "tool_use"),
    ],
)
def test_a_stream_brings_the_whole_answer(
    client: Any, more: dict[str, Any], kinds: list[str], reason: str
) -> None:
    asked = body(**more)
    whole = client.messages.create(**asked)
    assert ([block.type for block in whole.content], whole.stop_reason) == (kinds, reason)
    with client.messages.stream(**asked) as stream:
        events = [*stream]
        final = stream.get_final_message()
    assert shown(final) == shown(whole) and final.stop_reason == reason
    assert final.usage.output_tokens == whole.usage.output_tokens > 1
    assert [event.content_block.type for event in events if event.type == "content_block_start"] == kinds
    begun = [event.index for event in events if event.type == "content_block_start"]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert begun == ended == [*range(len(kinds))] and (events[0].type, events[-1].type) == ("message_start", "message_stop")


def test_thinking_has_its_budget_and_comes_back(client: Any) -> None:
    answer = client.messages.create(**body(thinking=THINKING))
    thought, text = answer.content
    assert thought.thinking and thought.signature and text.text and "<think>" not in thought.thinking + text.text
    turns = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And sum?"}]
    again = client.messages.create(**body(messages=turns, thinking={"type": "disabled"}))
    assert [block.type for block in again.content] == ["text"]
    short, long = (
        client.messages.create(**body(thinking={"type": "enabled", "budget_tokens": budget})).content[0].thinking
        for budget in (2, 12)
    )
    assert long.startswith(short.rstrip()[:2]) and len(short) < len(long)


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"tools": [WEATHER, NOW]}, {"thinking": THINKING}])
def test_the_count_of_tokens_is_what_an_answer_reads(client: Any, more: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(model="demo", messages=[USER], **more)
    usage = client.messages.create(**body(max_tokens=1, **more)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 4


def test_a_loop_of_calls_by_hand(client: Any) -> None:
    """Each turn sends the calls and results of all earlier ones, which the prefix cache still has."""
    messages: list[Any] = [USER]
    before = 0
    for turn in range(5):
        with client.messages.stream(
            **body(messages=messages, tools=[WEATHER, NOW], tool_choice={"type": "tool", "name": "weather"})
        ) as stream:
            answer = stream.get_final_message()
        (use,) = answer.content
        assert use.name == "weather" and use.input["city"] in ("Bonn", "Kiel") and len(use.input["note"]) <= 12
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"rain {turn}", "is_error": turn == 1}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert (answer.usage.cache_read_input_tokens or 0) > before - 16, "an earlier turn is computed again"
        before = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert before > 100


def test_the_package_s_own_loop_runs_its_tools(client: Any) -> None:
    """It asks for a thread first, and goes on without one when it gets the error for that."""
    from anthropic import beta_tool

    asked: list[str] = []

    @beta_tool
    def weather(city: Literal["Bonn", "Kiel"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "It rains."

    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=150, messages=[USER], tools=[weather], tool_choice=ANY, max_iterations=3
    )
    answers = [*runner]
    calls = [block for answer in answers for block in answer.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["weather"] * 3 == ["weather"] * len(answers)
    assert asked == [call.input["city"] for call in calls][: len(asked)] and len(asked) >= 2


def test_its_parsed_outputs(client: Any) -> None:
    parsed = client.messages.parse(**body(output_format=City))
    assert isinstance(parsed.parsed_output, City)
    with client.messages.stream(**body(output_format=City)) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_what_is_not_served_is_refused_by_name(server: Server, client: Any) -> None:
    import anthropic

    request: Any = {"custom_id": "a", "params": {"model": "demo", "max_tokens": 5, "messages": [USER]}}
    for ask in (lambda: client.messages.batches.create(requests=[request]), lambda: client.messages.batches.retrieve("b")):
        with pytest.raises(anthropic.NotFoundError, match="Batches in Anthropic's API are not supported: upload"):
            ask()
    with pytest.raises(anthropic.NotFoundError, match="There is nothing at /v1/skills: GET / lists the paths"):
        client.beta.skills.list()
    with pytest.raises(anthropic.BadRequestError, match="runs at Anthropic"):
        client.messages.create(**body(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    with pytest.raises(anthropic.NotFoundError, match="claude-of-tomorrow"):
        client.messages.create(**body(model="claude-of-tomorrow"))
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**body())
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported: send all messages"):
        client.beta.messages.create(**body(), thread={"type": "create"})
    assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve("demo").id == "demo"
    assert client.messages.create(**body(max_tokens=2)).stop_reason == "max_tokens"
