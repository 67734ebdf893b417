"""The official openai client against the real server: completions, chat, streams, logprobs, errors, many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import openai
import pytest
from serving import Server, eventually, held, serving

STREAM_COUNT = 64
IDLE_S = 3.0
IDLE_SHARE_MAX = 0.02


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--dtype", "float32", "--threads", "1", "--served-model-name", "demo", "--api-key", "secret"]
    with serving(tmp_path_factory.mktemp("logs"), *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_completion_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Return the", max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop") and answer.choices[0].text
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12


def test_a_stream_is_its_answer_in_pieces(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": "This module", "max_tokens": 30, "temperature": 0.8, "seed": 5}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3


def test_a_seed_repeats_and_answers_of_one_request_differ(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": "The class", "max_tokens": 24, "temperature": 1.0, "n": 3}
    first, again = (client.completions.create(**asked, seed=11) for _ in range(2))
    other = client.completions.create(**asked, seed=12)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3 and texts != [choice.text for choice in other.choices]


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What does len do?"}]
    asked = {"model": "demo", "messages": messages, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    entries = answer.choices[0].logprobs.content
    assert 1 <= len(entries) <= 5
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": "Return the", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:9]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_errors_are_typed_and_the_next_request_is_served(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as refused:
        client.completions.create(model="demo", prompt="x", max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="nothing-like-it"):
        client.completions.create(model="nothing-like-it", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).choices[0].finish_reason


def test_a_closed_stream_frees_its_blocks(server: Server, client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    aborted = server.metric("vnext_requests_aborted_total")
    with held(server):
        stream = client.completions.create(model="demo", prompt="This", max_tokens=100, stream=True, extra_body=extra)
        assert eventually(lambda: server.metric("vnext_blocks_held") > 0)
        stream.close()
        assert eventually(lambda: server.metric("vnext_requests_aborted_total") == aborted + 1)
    assert eventually(lambda: server.metric("vnext_blocks_held") == 0)


def test_many_streams_finish(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> int:
        stream = await client.completions.create(
            model="demo", prompt=f"Number {index}", max_tokens=40, stream=True, seed=index,
            extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        return chunks[-1].usage.completion_tokens

    async def all_of_them() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index) for index in range(STREAM_COUNT)))

    assert asyncio.run(all_of_them()) == [40] * STREAM_COUNT
    assert eventually(lambda: server.metric("vnext_blocks_held") == 0)


def test_an_idle_server_sleeps(server: Server) -> None:
    """Processor time, not wall time: busy neighbours do not change it."""
    before = [process.cpu_times() for process in server.processes]
    time.sleep(IDLE_S)
    after = [process.cpu_times() for process in server.processes]
    used_s = sum(b.user + b.system - a.user - a.system for a, b in zip(before, after))
    assert used_s < IDLE_SHARE_MAX * IDLE_S
