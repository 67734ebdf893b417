"""langchain-openai and pydantic-ai against the real server: structured modes, tools and streams, read by their own parsers.

The demo model knows little: calls are forced, and texts in schemas are bounded. instructor and litellm are not among them: they need
other versions of what vnext's environment has. Only the process that runs these tests loads the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field
from serving import Server, serving

WHY = 'the extra "clients" is not installed: pip install -c constraints.txt -e ".[dev,clients]"'
if None in map(find_spec, ("langchain_openai", "pydantic_ai")):
    pytest.skip(WHY, allow_module_level=True)

TEMPLATE = Path(__file__).with_name("agent_template.jinja")
METHODS = ("function_calling", "json_mode", "json_schema")
OUTPUTS = ("ToolOutput", "NativeOutput", "PromptedOutput")


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12, pattern="^[a-z]*$")]
    size: Literal["small", "large"]
    rivers: Annotated[list[Literal["Rhine", "Elbe"]], Field(max_length=2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("log"), "--chat-template", str(TEMPLATE), "--served-model-name", "demo") as running:
        yield running


class Anything(BaseModel):
    """An object."""


def closing(server: Server) -> int:
    """The token that a bias prefers, for an object to end before the model loses itself in it."""
    (token,) = httpx.post(f"{server.url}/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    return token


# ---- langchain-openai --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="demo", max_tokens=150, temperature=0.7, seed=3, max_retries=0
    )


def test_langchain_streams_what_it_answers(chat: Any) -> None:
    whole = chat.invoke("What does len do?")
    pieces = [*chat.stream("What does len do?", stream_usage=True)]
    assert whole.content and "".join(piece.content for piece in pieces) == whole.content
    (usage,) = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"] > 1


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("strict", [True, None])
def test_langchain_keeps_a_schema(chat: Any, method: str, strict: bool | None) -> None:
    city = chat.with_structured_output(City, method=method, strict=strict).invoke("Which city?")
    assert isinstance(city, City)
    last = [*chat.with_structured_output(City, method=method, strict=strict).stream("Which city?")][-1]
    assert last == city


def test_langchain_json_mode(server: Server, chat: Any) -> None:
    """The mode sends no schema, so any object answers it."""
    biased = chat.model_copy(update={"logit_bias": {closing(server): 100}})
    assert biased.with_structured_output(Anything, method="json_mode").invoke("As JSON, please") == Anything()
    assert biased.with_structured_output(None, method="json_mode").invoke("As JSON, please") == {}


@pytest.mark.parametrize("choice", ["any", "required", True, "City"])
def test_langchain_forces_a_tool(chat: Any, choice: Any) -> None:
    answer = chat.bind_tools([City], tool_choice=choice).invoke("Which city?")
    assert answer.tool_calls and (len(answer.tool_calls) == 1 or choice != "City")
    assert all(call["name"] == "City" for call in answer.tool_calls) and City(**answer.tool_calls[0]["args"])


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_langchain_leaves_the_choice(chat: Any, choice: str) -> None:
    answer = chat.bind_tools([City], tool_choice=choice).invoke("Which city?")
    assert answer.content or answer.tool_calls


def test_langchain_streams_a_call_and_takes_its_result(chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    forced = chat.bind_tools([City], tool_choice="City")
    pieces = [*forced.stream([HumanMessage("Which city?")])]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    (call,) = whole.tool_calls
    assert len(pieces) > 5 and City(**call["args"])
    again = forced.invoke([HumanMessage("Which city?"), whole, ToolMessage("It rains.", tool_call_id=call["id"])])
    assert City(**again.tool_calls[0]["args"])


# ---- pydantic-ai -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(server: Server) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))


def agent(server: Server, model: Any, mode: str, **options: Any) -> Any:
    """`mode` is a kind of output. A prompted output sends its schema as words only, so any object answers it."""
    import pydantic_ai

    settings: dict[str, Any] = {"max_tokens": 150, "temperature": 0.7, "seed": 3, "parallel_tool_calls": False}
    if mode == "PromptedOutput":
        output = pydantic_ai.PromptedOutput(Anything)
        settings["logit_bias"] = {closing(server): 100}
    else:
        output = getattr(pydantic_ai, mode)(City) if mode else str
    return pydantic_ai.Agent(model, output_type=output, model_settings=settings, retries=0, **options)


@pytest.mark.parametrize("mode", OUTPUTS)
def test_pydantic_ai_keeps_a_schema(server: Server, model: Any, mode: str) -> None:
    ran = agent(server, model, mode).run_sync("Which city?")
    assert isinstance(ran.output, Anything if mode == "PromptedOutput" else City) and ran.usage.output_tokens > 1


@pytest.mark.parametrize("mode", OUTPUTS)
def test_pydantic_ai_streams_an_output(server: Server, model: Any, mode: str) -> None:
    async def streamed() -> Any:
        async with agent(server, model, mode).run_stream("Which city?") as run:
            return await run.get_output()

    assert asyncio.run(streamed()) == agent(server, model, mode).run_sync("Which city?").output


def test_pydantic_ai_streams_a_text(server: Server, model: Any) -> None:
    async def pieces() -> list[str]:
        async with agent(server, model, "").run_stream("What does len do?") as run:
            return [piece async for piece in run.stream_text(delta=True, debounce_by=None)]

    found = asyncio.run(pieces())
    assert len(found) > 3 and "".join(found) == agent(server, model, "").run_sync("What does len do?").output


def test_pydantic_ai_runs_a_tool(server: Server, model: Any) -> None:
    """One of the seeds has the model call the tool; the next turn offers the output alone."""
    from pydantic_ai import Tool

    asked: list[str] = []

    async def until_asked(_: Any, definition: Any) -> Any:
        return None if asked else definition

    def weather(city: Literal["Bonn", "Kiel"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    tools = [Tool(weather, prepare=until_asked, strict=True)]
    for seed in range(20):
        ran = agent(server, model, "ToolOutput", tools=tools).run_sync("Which city?", model_settings={"seed": seed})
        assert isinstance(ran.output, City)
        if asked:
            break
    assert asked[0] in ("Bonn", "Kiel") and ran.usage.requests == 2
    parts = [part for message in ran.all_messages() for part in message.parts if part.part_kind == "tool-return"]
    assert [(part.tool_name, part.content) for part in parts][0] == ("weather", "rain")
