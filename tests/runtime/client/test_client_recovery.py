"""The engine core dies and another one follows it: a client's streams go on, and get everything once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, with_client

from vnext.runtime.client.client import EngineClient, EngineDead
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.client.output_stream import LiveRequest, OutputStream
from vnext.runtime.protocol.messages import (
    EngineDied,
    EngineStats,
    Goodbye,
    Hello,
    PromptResult,
    RequestOutput,
    SubmitRequest,
    derived_seed,
)
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling

PROMPT = pack_tokens([5, 6, 7, 8])
SAMPLING = Sampling(seed=1, max_tokens=100)
EXPECTED = list(range(10, 110))


def count_up(submitted: SubmitRequest) -> list[int]:
    return list(range(10, 10 + submitted.sampling.max_tokens))


def an_engine(address: str = "", **ready: Any) -> FakeEngine:
    return FakeEngine(count_up, address=address, **{"max_restarts": 3} | ready)


def request(name: str, **others: Any) -> SubmitRequest:
    return SubmitRequest(**{"name": name, "prompt": PROMPT, "sampling": SAMPLING} | others)


def tokens_of(output: RequestOutput) -> list[int]:
    return unpack_tokens(output.tokens).tolist()


def has_submitted(engine: FakeEngine, count: int) -> bool:
    return len(engine.of_kind(SubmitRequest)) == count


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never came true")


@pytest.mark.parametrize("logprobs", [-1, 2])
def test_streams_go_on_where_they_were(logprobs: int) -> None:
    """One of several requests, one that has merged outputs waiting, one that has had none, one that has ended."""
    sampling = Sampling(seed=1, max_tokens=100, logprobs=logprobs)

    async def use(client: EngineClient) -> None:
        engine.running.clear()
        ended = client.submit(name="ended", prompt=PROMPT, sampling=Sampling(seed=1, max_tokens=1))
        streams = [
            client.submit_all([request("a", sampling=sampling), request("b", sampling=sampling)]),
            client.submit(name="c", prompt=PROMPT, sampling=sampling),
        ]
        await until(lambda: has_submitted(engine, 4))
        engine.hold(3)
        first = await streams[0].take()
        await until(lambda: "ended" not in client._live and all(len(live.tokens) == 3 for live in client._live.values()))
        late = client.submit(name="late", prompt=PROMPT, sampling=sampling)
        await until(lambda: any(each.name == "late" for each in engine.of_kind(SubmitRequest)))
        known = {name: live.tokens.tolist() for name, live in client._live.items()}
        assert len(known["a"]) > 0 and known["late"] == []
        await asyncio.to_thread(engine.close)
        await until(lambda: client.trouble is not None)
        assert "has ended, and is started again" in client.trouble == client.recovering and client.death is None
        during = client.submit(name="during", prompt=PROMPT, sampling=sampling)
        with an_engine(engine.address) as second:
            found: dict[str, list[int]] = {name: [] for name in ("a", "b", "c", "late", "during")}
            logprob_count = 0
            for output in first:
                found[output.name] += tokens_of(output)
                logprob_count += len(output.logprobs)
            for stream in (*streams, late, during):
                async for output in stream:
                    found[output.name] += tokens_of(output)
                    logprob_count += len(output.logprobs)
            assert found == dict.fromkeys(found, EXPECTED)
            assert logprob_count == (500 if logprobs >= 0 else 0)
            assert [output.finish for output in await ended.take()] == ["length"], "it had come before the end"
            sent = second.of_kind(SubmitRequest)
            assert [each.name for each in sent] == ["a", "b", "c", "late", "during"]
            assert [unpack_tokens(each.generated).tolist() for each in sent] == [*known.values(), []]
            assert [each.deaths for each in sent] == [1, 1, 1, 1, 0]
            assert client.trouble is None and client.recoveries == 1 and client.recovery_seconds > 0
            assert len(second.of_kind(Hello)) == 1

    with an_engine() as engine:
        with_client(engine, use)


def test_aborts_and_closed_streams_are_not_resumed() -> None:
    async def use(client: EngineClient) -> None:
        engine.running.clear()
        aborted, closed, kept = (client.submit(name=name, prompt=PROMPT, sampling=SAMPLING) for name in ("a", "b", "c"))
        await until(lambda: has_submitted(engine, 3))
        engine.hold()
        await anext(aborted)
        await asyncio.to_thread(engine.close)
        await until(lambda: client.recovering != "")
        client.abort(["a"], "stop")
        closed.close()
        assert [output.finish async for output in aborted][-1] == "abort"
        with an_engine(engine.address) as second:
            outputs = [output async for output in kept]
            assert sum(map(tokens_of, outputs), []) == EXPECTED
            assert [type(each) for each in second.received] == [Hello, SubmitRequest]

    with an_engine() as engine:
        with_client(engine, use)


def test_an_engine_core_that_ends_by_an_error_is_followed_too() -> None:
    """It says so and still exists for a moment."""

    async def use(client: EngineClient) -> None:
        engine.hold()
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        tokens = tokens_of(await anext(stream))
        engine._silent = True
        engine.say(EngineDied(message="The engine stopped: a bug.", is_followed=True))
        await until(lambda: client.recovering == "The engine stopped: a bug, and is started again: requests wait.")
        await asyncio.to_thread(engine.close)
        with an_engine(engine.address):
            async for output in stream:
                tokens += tokens_of(output)
        assert tokens == EXPECTED

    with an_engine() as engine:
        with_client(engine, use)


@pytest.mark.parametrize("when", ["at once", "at the next hello"])
def test_an_end_without_a_successor_ends_the_streams(when: str) -> None:
    async def use(client: EngineClient) -> None:
        engine.hold()
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        await anext(stream)
        if when == "at once":
            engine.die("it cannot go on")
        else:
            await asyncio.to_thread(engine.close)
            await until(lambda: client.recovering != "")
            last = FakeEngine(count_up, silent=True, address=engine.address)
            await until(lambda: len(last.of_kind(Hello)) == 1)
            last.die("it cannot go on")
        with pytest.raises(EngineDead, match="it cannot go on"):
            async for _ in stream:
                pass
        assert client.death == "it cannot go on"
        if when != "at once":
            last.close()

    with an_engine() as engine:
        with_client(engine, use)


def test_engine_cores_that_die_before_they_are_ready_count_for_nothing() -> None:
    async def use(client: EngineClient) -> None:
        engine.hold()
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        tokens = tokens_of(await anext(stream))
        await asyncio.to_thread(engine.close)
        for _ in range(3):
            with FakeEngine(count_up, silent=True, address=engine.address) as starting:
                await until(lambda: len(starting.of_kind(Hello)) == 1)
        with an_engine(engine.address) as last:
            async for output in stream:
                tokens += tokens_of(output)
            assert [each.deaths for each in last.of_kind(SubmitRequest)] == [1]
        assert tokens == EXPECTED and client.recoveries == 1

    with an_engine() as engine:
        with_client(engine, use)


def test_deaths_without_a_token_are_counted_and_the_blamed_request_ends() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit_all([request("poison"), request("other")])
        await until(lambda: len(engine.of_kind(SubmitRequest)) == 2)
        await asyncio.to_thread(engine.close)
        for deaths in (1, 2):
            with an_engine(engine.address) as second:
                second.running.clear()
                await until(partial(has_submitted, second, 2))
                assert [each.deaths for each in second.of_kind(SubmitRequest)] == [deaths, deaths]
        with an_engine(engine.address, blamed="poison") as last:
            outputs = [output async for output in stream]
            assert [each.name for each in last.of_kind(SubmitRequest)] == ["other"]
        [poison] = [output for output in outputs if output.name == "poison"]
        assert poison.finish == "abort" and "ended several times in a row with this request" in poison.error
        assert sum((tokens_of(output) for output in outputs if output.name == "other"), []) == EXPECTED

    with an_engine() as engine:
        engine.running.clear()
        with_client(engine, use)


def test_a_request_without_a_seed_keeps_the_key_that_it_has() -> None:
    async def use(client: EngineClient) -> None:
        engine.hold()
        begun = client.submit(name="begun", prompt=PROMPT, sampling=SAMPLING, has_seed=False)
        await anext(begun)
        client.submit(name="waits", prompt=PROMPT, sampling=SAMPLING, has_seed=False)
        await until(lambda: len(engine.of_kind(SubmitRequest)) == 2)
        await asyncio.to_thread(engine.close)
        with an_engine(engine.address, root_seed=5) as second:
            await until(lambda: len(second.of_kind(SubmitRequest)) == 2)
            resumed, waited = second.of_kind(SubmitRequest)
            assert (resumed.has_seed, resumed.sampling.seed) == (True, derived_seed(77, 0))
            assert (waited.has_seed, waited.deaths) == (False, 1)

    with an_engine(root_seed=77) as engine:
        with_client(engine, use)


def test_what_first_outputs_report_comes_once() -> None:
    live = LiveRequest(request("a"), OutputStream(["a"], lambda names, reason: None))
    first = RequestOutput(name="a", tokens=b"", queue_seconds=0.5, cached_tokens=3, prompt=(PromptResult(id=0, hidden=b"1234"),))
    assert live.take(first) == first
    live.lose(0)
    assert live.take(first) == RequestOutput(name="a", tokens=b"", prompt=first.prompt), "no token is behind the prompt yet"
    live.take(RequestOutput(name="a", tokens=pack_tokens([9])))
    live.lose(0)
    again = RequestOutput(name="a", tokens=pack_tokens([10]), queue_seconds=0.5, cached_tokens=48, prompt=first.prompt)
    assert live.take(again) == RequestOutput(name="a", tokens=pack_tokens([10]))
    assert live.tokens.tolist() == [9, 10]


def test_recoveries_of_ranks_and_engine_cores_add_up() -> None:
    names = [field.name for field in msgspec.structs.fields(EngineStats) if field.type in (int, float)]

    async def use(client: EngineClient) -> None:
        engine.say(EngineStats(**dict.fromkeys(names, 0) | {"recoveries": 2, "recovery_seconds": 1.5}))
        await until(lambda: client.recoveries == 2)
        await asyncio.to_thread(engine.close)
        with an_engine(engine.address) as second:
            await until(lambda: client.recovering == "" and client.recoveries == 3)
            assert 1.5 < client.recovery_seconds < 1.5 + 60
            second.say(EngineStats(**dict.fromkeys(names, 0) | {"recoveries": 1}, recovering="Ranks are started again."))
            await until(lambda: client.recoveries == 4)
            assert client.trouble == client.recovering == "Ranks are started again."

    with an_engine() as engine:
        with_client(engine, use)


def test_other_weights_under_the_same_name_end_the_streams() -> None:
    async def use(client: EngineClient) -> None:
        engine.hold()
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with an_engine(engine.address, model_digest="other"), pytest.raises(EngineDead, match="model's files have changed"):
            async for _ in stream:
                pass

    with an_engine(model_digest="one") as engine:
        with_client(engine, use)


def test_a_client_that_leaves_during_a_recovery_leaves_at_once() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        await asyncio.to_thread(engine.close)
        await until(lambda: client.recovering != "")
        await client.close()
        with pytest.raises(EngineDead, match="closed by this process"):
            await anext(stream)

    async def run() -> None:
        await use(await EngineClient.connect(engine.address, 60.0))

    with an_engine() as engine:
        engine.running.clear()
        asyncio.run(run())
    with FakeEngine(count_up, address=engine.address) as later:
        assert later.of_kind(Goodbye) == []


def test_generate_goes_on() -> None:
    with an_engine() as engine, SyncEngineClient.connect(engine.address, 60.0) as client:
        engine.hold()
        outputs = client.run([request("a", sampling=Sampling(seed=1, max_tokens=400))])
        tokens = tokens_of(next(outputs))
        engine.close()
        with an_engine(engine.address):
            for output in outputs:
                tokens += tokens_of(output)
        assert tokens == list(range(10, 410)) and client.death is None
