"""Sessions of Python's and npm's clients with the demo model's server: `python scripts/check_clients.py PYTHON AGENTS [NPM]`.

PYTHON has vnext and starts the server; this program runs in an environment without it, which scripts/check_clients.sh makes. AGENTS
runs check_agents.py. NPM is the folder with the packages of check_clients.mjs; without it they are left out.
Prints each part that passed, or raises.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import instructor  # noqa: E402
import litellm  # noqa: E402
import openai  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

SCRIPT, AGENTS = Path(__file__).with_suffix(".mjs"), Path(__file__).with_name("check_agents.py")
NAMES = ("demo", "claude-sonnet-4-5")  # the AI SDK asks models of Anthropic's names in another way
MODEL = Path(__file__).resolve().parents[1] / "vnext" / "demo_model"
TEMPLATE = Path(__file__).resolve().parents[1] / "tests" / "e2e" / "agent_template.jinja"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Which city?"}], "temperature": 0.7, "seed": 3, "max_tokens": 400}
LITELLM = {"model": "hosted_vllm/demo", "api_key": "none", "num_retries": 0}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12, pattern="^[a-z]*$")]
    size: Literal["small", "large"]


class Anything(BaseModel):
    """An object: the modes that send no schema to the server take it."""


TOOL = {"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "City"}}}

CALLED = {
    "type": "object",
    "properties": {"name": {"const": "City"}, "arguments": City.model_json_schema()},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CALLS = f'start: "<tool_call>\\n" %json {json.dumps(CALLED)} "\\n</tool_call>"'
"""A call as the model's template writes them, for a mode that leaves the choice to the model."""


def kept(**structure: Any) -> dict[str, Any]:
    """What keeps an answer to a shape in a mode that leaves it to the model."""
    return {"extra_body": {"structured_outputs": structure | {"disable_any_whitespace": True}}}


def closing(url: str) -> dict[str, int]:
    """A bias towards the end of an object."""
    client = openai.OpenAI(base_url=url, api_key="none")
    tokens = client.post("/tokenize", body={"prompt": "}", "add_special_tokens": False}, cast_to=dict[str, Any])["tokens"]
    return {str(tokens[0]): 100}


def instructor_modes(url: str) -> None:
    for mode, of, extra in (
        (instructor.Mode.TOOLS, City, {}),
        (instructor.Mode.TOOLS_STRICT, City, {}),
        (instructor.Mode.PARALLEL_TOOLS, Iterable[City], kept(grammar=CALLS)),
        (instructor.Mode.JSON_SCHEMA, City, {}),
        (instructor.Mode.JSON, Anything, {"logit_bias": closing(url)}),
        (instructor.Mode.MD_JSON, City, kept(json=City.model_json_schema())),
    ):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        found = client.chat.completions.create(model="demo", response_model=of, max_retries=0, **ASKED, **extra)
        several = mode is instructor.Mode.PARALLEL_TOOLS
        answers = [*found] if several else [found]
        assert answers and all(isinstance(each, City if several else of) for each in answers), mode


def instructor_streams(url: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        parts = [*client.chat.completions.create_partial(model="demo", response_model=City, max_retries=0, **ASKED)]
        assert len(parts) > 2 and City.model_validate(parts[-1].model_dump()), mode  # it sends another schema than a whole answer's


def litellm_chat(url: str) -> None:
    base = {**LITELLM, "api_base": f"{url}/v1"}
    whole = litellm.completion(**base, **ASKED)
    pieces = [*litellm.completion(**base, **ASKED, stream=True, stream_options={"include_usage": True})]
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert whole.choices[0].message.content and "".join(texts) == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 1
    rebuilt = litellm.stream_chunk_builder(pieces, messages=ASKED["messages"])
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def litellm_tools(url: str) -> None:
    base = {**LITELLM, "api_base": f"{url}/v1"}
    (call,) = litellm.completion(**base, **ASKED, **FORCED).choices[0].message.tool_calls
    assert call.function.name == "City"
    city = City.model_validate_json(call.function.arguments)
    chunks = [*litellm.completion(**base, **ASKED, **FORCED, stream=True)]
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert City.model_validate_json(streamed.function.arguments) == city
    kept = litellm.completion(**base, **ASKED, response_format=City).choices[0].message.content
    assert City.model_validate_json(kept)


def litellm_rest(url: str) -> None:
    base = {"api_key": "none", "api_base": f"{url}/v1"}
    text = litellm.text_completion(model="text-completion-openai/demo", prompt="Return the", max_tokens=8, temperature=0, **base)
    assert text.choices[0].text and text.usage.completion_tokens <= 8
    vectors = litellm.embedding(model="hosted_vllm/demo", input=["Return the", "This module"], **base)
    assert len(vectors.data) == 2 and vectors.data[0]["embedding"] != vectors.data[1]["embedding"]


def litellm_messages(url: str) -> None:
    """Anthropic's protocol through litellm, whole and streamed."""

    async def both() -> None:
        base: dict[str, Any] = {"model": "anthropic/demo", "api_key": "none", "api_base": url, "max_tokens": 20}
        whole = await litellm.anthropic.messages.acreate(messages=ASKED["messages"], **base)
        assert whole["content"][0]["type"] == "text" and whole["usage"]["output_tokens"] > 0
        stream = await litellm.anthropic.messages.acreate(messages=ASKED["messages"], stream=True, **base)
        events = b"".join([piece if isinstance(piece, bytes) else str(piece).encode() async for piece in stream])
        assert events.count(b"event: message_start") == events.count(b"event: message_stop") == 1

    asyncio.run(both())


SESSIONS: tuple[Callable[[str], None], ...] = (
    instructor_modes, instructor_streams, litellm_chat, litellm_tools, litellm_rest, litellm_messages,
)  # fmt: skip


@contextmanager
def serving(python: str) -> Iterator[str]:
    """The address of a server."""
    options = ("--port", "0", "--threads", "1", "--served-model-name", *NAMES, "--chat-template", str(TEMPLATE))
    with tempfile.TemporaryDirectory() as log:
        command = [python, "-m", "vnext.commands.cli", "serve", str(MODEL), "--log-dir", log, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            found = next((line for line in process.stdout or () if " on http://" in line), None)
            assert found, "the server did not start"
            yield found.split(" on ")[1].strip()
        finally:
            process.terminate()
            process.wait(30)


def main(python: str, agents: str, npm: str = "") -> None:
    with serving(python) as url:
        for session in SESSIONS:
            session(url)
            print(f"ok {session.__name__}", flush=True)
        subprocess.run([agents, str(AGENTS), url], check=True)
        if npm:
            subprocess.run(["node", str(SCRIPT), url, npm], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
