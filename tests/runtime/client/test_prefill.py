"""A prompt is computed by one engine and answered by another: what each is sent, and what becomes of it when one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from fake_engine import FakeEngine
from msgspec.structs import replace

from vnext.runtime.client.engines import connect_engines
from vnext.runtime.client.replicas import Replicas
from vnext.runtime.protocol.messages import AbortRequests, RequestOutput, SubmitRequest
from vnext.runtime.protocol.settings import Roles
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import NO_POOLING, Sampling

SAMPLING = Sampling(seed=1, max_tokens=5)
PROMPT = list(range(20))


def count_up(submitted: SubmitRequest) -> list[int]:
    return list(range(10, 10 + submitted.sampling.max_tokens))


def request(name: str = "a", prompt: list[int] = PROMPT, **others: Any) -> SubmitRequest:
    return SubmitRequest(**{"name": name, "prompt": pack_tokens(prompt), "sampling": SAMPLING} | others)


class Prefilling(FakeEngine):
    """An engine whose last outputs have a ticket where one is asked for."""

    def _send(self, peer: bytes, message: Any) -> None:
        asked = {each.name for each in self.of_kind(SubmitRequest) if each.hands_over}
        if hasattr(message, "outputs"):
            outputs = [replace(each, ticket="T", cached_tokens=3) if each.finish and each.name in asked else each for each in message.outputs]
            message = replace(message, outputs=tuple(outputs))
        super()._send(peer, message)


def with_engines(work: Callable[..., Any], *kinds: type[FakeEngine]) -> None:
    """Run `work(client, engines)`: the first engine computes prompts for the others."""
    with ExitStack() as stack:
        engines = [stack.enter_context(kind(count_up, address="", max_restarts=3)) for kind in kinds]

        async def run() -> None:
            client = await connect_engines([each.address for each in engines], policy="round_robin", roles=Roles(prefill=1))
            try:
                await asyncio.wait_for(work(client, engines), 60)
            finally:
                await client.close()

        asyncio.run(run())


async def tokens_of(client: Replicas, *requests: SubmitRequest) -> tuple[list[int], list[RequestOutput]]:
    found = [output async for output in client.submit_all(requests)]
    return [token for output in found for token in unpack_tokens(output.tokens).tolist()], found


def submitted(engine: FakeEngine) -> list[SubmitRequest]:
    return engine.of_kind(SubmitRequest)


def test_a_prompt_goes_to_both():
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        tokens, outputs = await tokens_of(client, request())
        assert tokens == list(range(10, 15)) and outputs[0].cached_tokens == 3, "as the first engine found them"
        [first], [second] = map(submitted, engines)
        assert first.hands_over and first.sampling.max_tokens == 1 and not first.ticket
        assert second == replace(request(), ticket="T")

    with_engines(work, Prefilling, FakeEngine)


def test_an_engine_without_blocks_to_hand_over_costs_nothing_but_time():
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        assert (await tokens_of(client, request()))[0] == list(range(10, 15))
        assert [len(submitted(each)) for each in engines] == [1, 1] and submitted(engines[1])[0].ticket == ""

    with_engines(work, FakeEngine, FakeEngine)


def test_what_no_hand_over_helps_goes_to_one():
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        others = (
            request("short", PROMPT[:16]), request("scored", sampling=replace(SAMPLING, prompt_logprobs=0)),
            request("embedded", sampling=replace(SAMPLING, pooling=NO_POOLING + 1)),
        )  # fmt: skip
        for each in others:
            await tokens_of(client, each)
        assert submitted(engines[0]) == [] and len(submitted(engines[1])) == 3

    with_engines(work, Prefilling, FakeEngine)


def test_a_client_that_leaves_ends_the_prompt():
    async def work(client: Replicas, engines: list[FakeEngine]) -> None:
        with closing(client.submit_all([request(sampling=replace(SAMPLING, max_tokens=400))])):
            pass
        for _ in range(6_000):
            if engines[0].of_kind(AbortRequests):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nobody ended it")

    with_engines(work, FakeEngine, FakeEngine)
