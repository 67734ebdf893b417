"""A prompt's inputs are encoded by one engine before another one computes it: what each is sent, and what becomes of it when the one
that encodes refuses, is late or ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from msgspec.structs import replace

from vnext.runtime.client import encode
from vnext.runtime.client.engines import connect_engines
from vnext.runtime.client.output_stream import LiveRequest, OutputStream
from vnext.runtime.client.replicas import Replicas
from vnext.runtime.protocol.messages import AbortRequests, SubmitRequest
from vnext.runtime.protocol.settings import Roles
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import NO_POOLING, Sampling
from vnext.state.store.inputs import input_tokens

FIRST, SECOND = (input_tokens(letter * 15, 6).tolist() for letter in (b"a", b"b"))
REQUEST = SubmitRequest(
    name="a", prompt=pack_tokens([5, *FIRST, 6, 7, *SECOND, 8, 9, *range(20)]), sampling=Sampling(seed=1, max_tokens=5), cache_salt="s", client=3
)
ANSWER = list(range(10, 15))


def count_up(submitted: SubmitRequest) -> list[int]:
    return list(range(10, 10 + submitted.sampling.max_tokens))


def with_engines(work: Callable[..., Any], *, prefill: int = 0, count: int = 1, **encoding: Any) -> None:
    """Run `work(client, engines)`: the last of `count` and one engines encodes."""
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(count_up, max_restarts=3)) for _ in range(count)]
        engines.append(stack.enter_context(FakeEngine(count_up, max_restarts=3, **encoding)))

        async def run() -> None:
            client = await connect_engines([each.address for each in engines], 60.0, "round_robin", 0, Roles(prefill, 1))
            try:
                await asyncio.wait_for(work(client, engines), 20)
            finally:
                await client.close()

        asyncio.run(run())


async def tokens_of(client: Replicas, *requests: SubmitRequest) -> list[int]:
    return [token async for output in client.submit_all(requests) for token in unpack_tokens(output.tokens).tolist()]


def submitted(engine: FakeEngine) -> list[SubmitRequest]:
    return engine.of_kind(SubmitRequest)


def test_inputs_go_to_one_engine_and_then_the_request_to_another() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        assert await tokens_of(client, REQUEST) == ANSWER
        [own], [first] = map(submitted, engines)
        assert own == REQUEST and first.encodes and first.sampling.max_tokens == 1
        assert np.array_equal(unpack_tokens(first.prompt), [*FIRST, *SECOND, encode.BEHIND])

    with_engines(work)


def test_before_prefill_and_decode() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        assert await tokens_of(client, REQUEST) == ANSWER
        assert [[each.hands_over for each in submitted(engine)] for engine in engines] == [[True], [False], [False]]
        assert [[each.encodes for each in submitted(engine)] for engine in engines] == [[False], [False], [True]]

    with_engines(work, prefill=1, count=2)


def test_requests_of_one_prompt_stay_together_while_their_engine_lives() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        wishes = [replace(REQUEST, name=name) for name in "abc"]
        for times in range(1, 4):
            await tokens_of(client, *wishes)
            assert len(submitted(engines[2])) == 3 * times and {len(submitted(engine)) % 3 for engine in engines[:2]} == {0}
        engines[0].close()
        while client.engines[0].is_up:
            await asyncio.sleep(0.01)
        stream, before = OutputStream({"d"}, lambda names, reason: None), len(submitted(engines[1]))
        client._encoded({(REQUEST.prompt, False): 0}, LiveRequest(replace(REQUEST, name="d", deaths=1), stream))
        assert [token async for output in stream for token in unpack_tokens(output.tokens).tolist()] == ANSWER
        assert len(submitted(engines[1])) == before + 1

    with_engines(work, count=2)


def test_what_has_no_inputs_to_encode_goes_to_one() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        await tokens_of(client, replace(REQUEST, prompt=pack_tokens([3, 4])))
        await tokens_of(client, replace(REQUEST, sampling=replace(REQUEST.sampling, pooling=NO_POOLING + 1)))
        assert submitted(engines[1]) == []

    with_engines(work)


def test_a_refusal_costs_nothing() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        assert await tokens_of(client, REQUEST) == ANSWER and len(submitted(engines[1])) == 1

    with_engines(work, refuse=lambda request: "no")


def test_the_end_of_the_engine_costs_nothing() -> None:
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        engines[1].running.clear()
        asked, began_s = asyncio.ensure_future(tokens_of(client, REQUEST)), time.monotonic()
        await asyncio.to_thread(engines[1].wait_for, lambda: bool(submitted(engines[1])))
        engines[1].close()
        assert await asked == ANSWER and time.monotonic() - began_s < encode.PATIENCE_S / 2 and submitted(engines[0]) == [REQUEST]

    with_engines(work)


def test_one_that_is_late_is_left_and_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PATIENCE_S", 0.2)

    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        engines[1].running.clear()
        assert await tokens_of(client, REQUEST) == ANSWER and submitted(engines[0]) == [REQUEST]
        await asyncio.to_thread(engines[1].wait_for, lambda: bool(engines[1].of_kind(AbortRequests)))

    with_engines(work)


def test_patience_ends_with_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PATIENCE_S", 0.3)

    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        engines[0].running.clear()
        asked = asyncio.ensure_future(tokens_of(client, REQUEST))
        await asyncio.sleep(0.6)
        engines[0].running.set()
        assert await asked == ANSWER and submitted(engines[0]) == [REQUEST], "once"

    with_engines(work)


def test_a_client_that_leaves_ends_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PATIENCE_S", 1.0)

    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        engines[1].running.clear()
        with closing(client.submit_all([REQUEST])):
            await asyncio.to_thread(engines[1].wait_for, lambda: bool(submitted(engines[1])))
            assert client.live_count == 1
        await asyncio.to_thread(engines[1].wait_for, lambda: bool(engines[1].of_kind(AbortRequests)))
        await asyncio.sleep(1.2)
        assert client.live_count == 0 and submitted(engines[0]) == [], "and nobody computes it behind it"

    with_engines(work)
