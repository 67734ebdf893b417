"""The official openai client against the real server: files, batches, embeddings, responses, parsed outputs and tools.

The demo model knows little: calls are forced, and texts are bounded by schemas.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from serving import Server, eventually, serving

TEMPLATE = Path(__file__).with_name("agent_template.jinja")
CHAT, ENDS = "/v1/chat/completions", ("completed", "failed", "cancelled", "expired")
ASKED = "What does len do?"
EVENT = TypeAdapter(ResponseStreamEvent)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12, pattern="^[a-z]*$")]
    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    batches = str(tmp_path_factory.mktemp("batches"))
    arguments = ["--chat-template", str(TEMPLATE), "--served-model-name", "demo", "--threads", "1", "--batch-dir", batches]
    with serving(tmp_path_factory.mktemp("log"), *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# ---- files and batches -------------------------------------------------------------------------------------------


def line(url: str, custom_id: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo"} | body})


def ended(client: openai.OpenAI, id_: str) -> Any:
    assert eventually(lambda: client.batches.retrieve(id_).status in ENDS)
    return client.batches.retrieve(id_)


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    return {each["custom_id"]: each["response"] for each in map(json.loads, client.files.content(file_id).text.splitlines())}


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 12, "temperature": 0}),
    ("/v1/completions", {"prompt": "Return the", "max_tokens": 12, "temperature": 0}),
    ("/v1/responses", {"input": ASKED, "max_output_tokens": 12, "temperature": 0}),
    ("/v1/embeddings", {"input": "Return the"}),
]


@pytest.mark.parametrize(("url", "body"), BODIES)
def test_a_batch_answers_as_the_live_server_does(client: openai.OpenAI, url: str, body: dict[str, Any]) -> None:
    lines = "\n".join([line(url, "a", **body), line(url, "b", **body), line(url, "wrong", **body, top_p="high")])
    file = client.files.create(file=("asked.jsonl", lines.encode()), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(lines) and file.id in [each.id for each in client.files.list()]
    started = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"of": "tests"})
    assert started.id in [each.id for each in client.batches.list()]
    batch = ended(client, started.id)
    wrong = 0 if url == "/v1/embeddings" else 1  # an unknown field of an embedding changes nothing
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3 - wrong, wrong)
    assert batch.metadata == {"of": "tests"}
    good = results(client, batch.output_file_id)
    alike: dict[str, Any] = {"cast_to": dict[str, Any], "body": {"model": "demo"} | body}
    live = client.post(url.removeprefix("/v1"), **alike)
    for custom_id in ("a", "b"):
        assert words(good[custom_id]["body"]) == words(live) != []
    if wrong:
        assert results(client, batch.error_file_id)["wrong"]["status_code"] == 400
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def words(answer: dict[str, Any]) -> Any:
    """What an answer of any of the APIs says."""
    if "output" in answer:
        return [item["content"][0]["text"] for item in answer["output"]]
    if "choices" in answer:
        return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    return [each["embedding"] for each in answer["data"]]


def test_a_cancelled_batch_ends(client: openai.OpenAI) -> None:
    lines = [line("/v1/completions", str(at), prompt="Go", max_tokens=200, ignore_eos=True) for at in range(300)]
    file = client.files.create(file=("long.jsonl", "\n".join(lines).encode()), purpose="batch")
    started = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    client.batches.cancel(started.id)
    batch = ended(client, started.id)
    assert batch.status == "cancelled" and batch.request_counts.completed < 300
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]


# ---- embeddings --------------------------------------------------------------------------------------------------


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    texts = ["Return the length", "This module", "Return the length"]
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    assert [each.index for each in plain.data] == [0, 1, 2] and plain.usage.prompt_tokens == plain.usage.total_tokens > 3
    first, other, again = (each.embedding for each in plain.data)
    assert first == again != other and math.isclose(math.hypot(*first), 1, rel_tol=1e-5)
    packed = client.embeddings.create(model="demo", input=texts)  # the package asks for base64 and unpacks it
    assert np.array_equal(np.float32([each.embedding for each in packed.data]), np.float32([first, other, again]))
    raw = client.embeddings.create(model="demo", input=texts[0], encoding_format="base64").data[0].embedding
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), np.float32), np.float32(first))  # type: ignore[arg-type]
    short = client.embeddings.create(model="demo", input=texts[0], dimensions=8, encoding_format="float").data[0].embedding
    assert len(short) == 8 and math.isclose(math.hypot(*short), 1, rel_tol=1e-5)


# ---- responses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [False, True])
def test_a_response_s_events_are_of_the_package_s_types(client: openai.OpenAI, thinks: bool) -> None:
    extra = {"enable_thinking": True, "thinking_token_budget": 8} if thinks else {}
    asked: dict[str, Any] = {"model": "demo", "input": ASKED, "temperature": 0, "max_output_tokens": 60, "extra_body": extra}
    whole = client.responses.create(**asked)
    with client.responses.with_streaming_response.create(**asked, stream=True) as answer:
        frames = [frame.split("\ndata: ") for frame in answer.read().decode().strip().split("\n\n")]
    sent = [EVENT.validate_json(frame[1], strict=False) for frame in frames]
    assert [frame[0] for frame in frames] == [f"event: {event.type}" for event in sent]
    assert [event.sequence_number for event in sent] == [*range(len(sent))]
    assert (sent[0].type, sent[-1].type) == ("response.created", f"response.{whole.status}")
    final = sent[-1].response
    deltas = [event.delta for event in sent if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == final.output_text and len(deltas) > 3
    assert [item.type for item in final.output] == [item.type for item in whole.output] == ["reasoning"] * thinks + ["message"]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_responses_continue_one_another(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 20}
    first = client.responses.create(input=ASKED, **asked)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.type for item in client.responses.input_items.list(first.id)] == ["message"]
    then = client.responses.create(input="And sum?", previous_response_id=first.id, **asked)
    turns = [{"role": "user", "content": ASKED}, *first.output, {"role": "user", "content": "And sum?"}]
    alike = client.responses.create(input=turns, store=False, **asked)  # type: ignore[arg-type]
    assert then.output_text == alike.output_text and then.usage.input_tokens == alike.usage.input_tokens
    counted = client.responses.input_tokens.count(model="demo", input="And sum?", previous_response_id=first.id)
    assert counted.input_tokens == then.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match=alike.id):
        client.responses.retrieve(alike.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.APIStatusError, match=first.id):
        client.responses.create(input="x", previous_response_id=first.id, **asked)


# ---- parsed outputs ----------------------------------------------------------------------------------------------


def test_parsed_outputs_of_chats_and_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.7, "extra_body": {"seed": 3}}
    messages: Any = [{"role": "user", "content": "Which city?"}]
    whole = client.chat.completions.parse(messages=messages, response_format=City, max_tokens=300, **asked)
    with client.chat.completions.stream(messages=messages, response_format=City, max_tokens=300, **asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, City) and {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    response = client.responses.parse(input="Which city?", text_format=City, max_output_tokens=300, **asked)
    with client.responses.stream(input="Which city?", text_format=City, max_output_tokens=300, **asked) as events:
        streamed = events.until_done().get_final_response()
    assert isinstance(response.output_parsed, City) and streamed.output_parsed == response.output_parsed


def test_parsed_calls_of_chats_and_responses(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Which city?"}]
    asked: dict[str, Any] = {"model": "demo", "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    tools = [openai.pydantic_function_tool(City)]
    whole = client.chat.completions.parse(messages=messages, tools=tools, max_tokens=300, **asked)
    with client.chat.completions.stream(messages=messages, tools=tools, max_tokens=300, **asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    (one,) = whole.choices[0].message.tool_calls or []
    assert isinstance(one.function.parsed_arguments, City) and call.function.parsed_arguments == one.function.parsed_arguments
    assert [event.name for event in done] == ["City"]
    flat: Any = [{"type": "function", **tools[0]["function"]}]
    response = client.responses.parse(input=messages, tools=flat, max_output_tokens=300, **asked)
    (item,) = response.output
    assert item.type == "function_call" and City.model_validate_json(item.arguments) == one.function.parsed_arguments


def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI) -> None:
    for path, ask in (
        ("/v1/images/generations", lambda: client.images.generate(model="demo", prompt="a cat")),
        ("/v1/audio/speech", lambda: client.audio.speech.create(model="demo", voice="alloy", input="Hi")),
        ("/v1/moderations", lambda: client.moderations.create(model="demo", input="Hi")),
    ):
        with pytest.raises(openai.NotFoundError, match=f"There is nothing at {path}: GET / lists the paths of this server"):
            ask()
