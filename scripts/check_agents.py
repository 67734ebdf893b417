"""Sessions of OpenAI's Agents SDK and pydantic-ai with tools and a schema together: `python scripts/check_agents.py URL`.

The server at URL serves the demo model; scripts/check_clients.py starts it. What the model says is left to it, so a session may end
with too many turns, but every call and every answer must have its schema. Prints each part that passed, or raises.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any, Literal

import openai
from agents import Agent, MaxTurnsExceeded, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent as PydanticAgent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

Place = Annotated[str, Field(max_length=12, pattern="^[a-z]*$")]
SEEDS = (1, 2, 3)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Place
    size: Literal["small", "large"]


async def openai_agents(url: str) -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asked: list[str] = []

        @function_tool
        def weather(place: Place) -> str:
            """The weather of a place."""
            asked.append(place)  # noqa: B023  (it is called before the next one is made)
            return "rain"

        for choice in ("required", "auto"):
            for seed in SEEDS:
                settings = ModelSettings(
                    tool_choice=choice, max_tokens=200, temperature=0.7, parallel_tool_calls=False, extra_body={"seed": seed}
                )
                agent = Agent(
                    name="Clerk", instructions="Short.", model=kind("demo", client), tools=[weather], output_type=City,
                    model_settings=settings,
                )  # fmt: skip
                for streams in (False, True):
                    try:
                        if streams:
                            ran: Any = Runner.run_streamed(agent, "Which city?", max_turns=6)
                            assert [event.type async for event in ran.stream_events()]
                        else:
                            ran = await Runner.run(agent, "Which city?", max_turns=6)
                        assert isinstance(ran.final_output, City)
                    except MaxTurnsExceeded:
                        pass
        assert len(asked) >= 6, (kind.__name__, asked)


async def pydantic_agents(url: str) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, PydanticResponsesModel):
        for output in (NativeOutput(City), ToolOutput(City)):
            agent = PydanticAgent(kind("demo", provider=provider), output_type=output, retries=0)
            asked: list[str] = []

            @agent.tool_plain
            def weather(place: Place) -> str:
                """The weather of a place."""
                asked.append(place)  # noqa: B023
                return "rain"

            ended = 0
            for seed in SEEDS:
                settings: Any = {"temperature": 0.7, "max_tokens": 120, "extra_body": {"seed": seed}}
                try:
                    ran = await agent.run("Which city?", model_settings=settings, usage_limits=UsageLimits(request_limit=3))
                except UsageLimitExceeded:
                    continue
                assert isinstance(ran.output, City)
                ended += 1
            assert ended or asked, (kind.__name__, output)


if __name__ == "__main__":
    for session in (openai_agents, pydantic_agents):
        asyncio.run(session(sys.argv[1]))
        print(f"ok {session.__name__}", flush=True)
