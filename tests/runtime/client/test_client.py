"""The engine core's clients: streams, merging, refusals, aborts, and every way in which an engine can be lost."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import pytest
import zmq
from fake_engine import FakeEngine, wait_until, with_client

from vnext.runtime.client.client import EngineClient, EngineDead, Refused
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.client.connection import MESSAGES_A_TURN
from vnext.runtime.protocol.merged_output import MergedOutput
from vnext.runtime.protocol.messages import Goodbye, Ping, RequestOutput, ResetPrefixCache, SubmitRequest
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling

SAMPLING = Sampling(seed=1, max_tokens=100)
PROMPT = pack_tokens([5, 6, 7, 8])


def request(name: str, sampling: Sampling = SAMPLING, prompt: bytes = PROMPT) -> SubmitRequest:
    return SubmitRequest(name=name, prompt=prompt, sampling=sampling)


def count_up(submitted: SubmitRequest) -> list[int]:
    return list(range(10, 10 + submitted.sampling.max_tokens))


def test_stream_gives_every_token_once_and_ends() -> None:
    async def use(client: EngineClient) -> None:
        assert client.ready.model == "folder/toy" and client.stats is None
        assert client._connection._socket.get(zmq.HEARTBEAT_IVL) == 0, "ZMQ takes a process that is stopped for one that is gone"
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        tokens, finishes = [], []
        async for output in stream:
            tokens += unpack_tokens(output.tokens).tolist()
            finishes.append(output.finish)
        assert tokens == list(range(10, 110))
        assert finishes[-1] == "length" and not any(finishes[:-1])
        assert client.live_count == 0 and stream.live == frozenset()
        async for _ in stream:
            pytest.fail("an ended stream goes on")
        while client.stats is None:
            await asyncio.sleep(0.005)
        assert client.stats.finished == 7

    with FakeEngine(count_up) as engine:
        with_client(engine, use)
        engine.wait_for(lambda: len(engine.of_kind(Goodbye)) == 1)
        assert not [message for message in engine.received if hasattr(message, "reason")]


def test_an_engine_that_is_ahead_does_not_keep_the_loop() -> None:
    turns = 0

    async def use(client: EngineClient) -> None:
        nonlocal turns
        stream = client.submit_all([request("a")])
        while not engine.of_kind(SubmitRequest):
            await asyncio.sleep(0.005)
        engine.running.set()
        while engine._live:
            time.sleep(0.01)  # in which the loop reads nothing
        time.sleep(0.05)
        while client.live_count:
            turns += 1
            await asyncio.sleep(0)
        await stream.take()

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)
    assert turns >= 100 // MESSAGES_A_TURN


def test_slow_consumer_gets_one_merged_output() -> None:
    async def use(client: EngineClient) -> None:
        sampling = Sampling(seed=1, max_tokens=100, logprobs=2)
        stream = client.submit_all([request("a", sampling), request("b", sampling)])
        while client.live_count:
            await asyncio.sleep(0.005)
        outputs = await stream.take()
        assert [output.name for output in outputs] == ["a", "b"]
        for output in outputs:
            assert unpack_tokens(output.tokens).tolist() == list(range(10, 110))
            assert len(output.logprobs) == 100 and output.finish == "length" and output.cached_tokens == 3
        assert await stream.take() == ()

    with FakeEngine(count_up) as engine:
        with_client(engine, use)


def test_a_merged_output_has_what_its_parts_have() -> None:
    merged, last = MergedOutput(), {"finish": "stop", "stop_token": 7, "accepted_drafts": 2, "rejected_drafts": 1}
    merged.add(RequestOutput(name="a", tokens=pack_tokens([5, 6]), cached_tokens=3, queue_seconds=0.5))
    merged.add(RequestOutput(name="a", tokens=pack_tokens([7]), **last))
    assert merged.merged("a") == RequestOutput(name="a", tokens=pack_tokens([5, 6, 7]), cached_tokens=3, queue_seconds=0.5, **last)
    assert 0 < merged.taken("a").first_s <= merged.taken("a").finish_s and merged.taken("a").tokens == pack_tokens([5, 6, 7])


def test_refusal_raises_and_aborts_the_rest() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit_all([request("good"), request("bad")])
        with pytest.raises(Refused, match="too long by 3") as caught:
            async for _ in stream:
                pass
        assert caught.value.name == "bad" and client.live_count == 0
        engine.running.set()
        assert [output async for output in client.submit(name="next", prompt=PROMPT, sampling=SAMPLING)]

    with FakeEngine(count_up, lambda submitted: "too long by 3" if submitted.name == "bad" else None) as engine:
        engine.running.clear()
        refused = engine.wait_aborts

        with_client(engine, use)
        assert refused("client") == ["good"]


def test_closing_and_cancelling_abort_as_client() -> None:
    async def use(client: EngineClient) -> None:
        with closing(client.submit(name="closed", prompt=PROMPT, sampling=SAMPLING)):
            pass
        stream = client.submit(name="cancelled", prompt=PROMPT, sampling=SAMPLING)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.live_count == 0

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)
        engine.wait_for(lambda: engine.wait_aborts("client") == ["closed", "cancelled"])


def test_abort_ends_the_stream_at_once_and_ignores_ended_names() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit_all([request("a"), request("b")])
        client.abort(["a", "long gone"], "stop")
        output = await anext(stream)
        assert (output.name, output.finish, output.tokens) == ("a", "abort", b"")
        assert stream.live == {"b"}
        client.abort_all("shutdown")
        assert [output.finish async for output in stream] == ["abort"]
        client.abort_all("shutdown")
        client.reset_prefix_cache()

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)
        assert engine.wait_aborts("stop") == ["a"]
        assert engine.wait_aborts("shutdown") == ["b"]
        engine.wait_for(lambda: len(engine.of_kind(ResetPrefixCache)) == 1)


def test_a_live_name_is_not_given_twice() -> None:
    async def use(client: EngineClient) -> None:
        client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        with pytest.raises(ValueError, match="unique"):
            client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        with pytest.raises(ValueError, match="unique"):
            client.submit_all([request("b"), request("b")])
        assert client.live_count == 1

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)


@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_engine_ends_every_stream(silently: bool) -> None:
    sentence = "connection .* is lost" if silently else "rank 3 ran out of memory"

    async def use(client: EngineClient) -> None:
        streams = [client.submit(name=name, prompt=PROMPT, sampling=SAMPLING) for name in "abc"]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.to_thread(engine.close) if silently else engine.die("rank 3 ran out of memory")
        for task in waiting:
            with pytest.raises(EngineDead, match=sentence):
                await task
        assert client.death is not None and client.live_count == 0
        with pytest.raises(EngineDead, match=sentence):
            client.submit(name="d", prompt=PROMPT, sampling=SAMPLING)

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)


def test_a_silent_engine_ends_nothing_and_is_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Frozen with a request under way and one that comes meanwhile: both are answered in full afterwards."""
    for name, seconds in {"silence.INTERVAL_S": 0.02, "silence.SILENT_S": 0.2}.items():
        monkeypatch.setattr(f"vnext.runtime.client.{name}", seconds)

    async def use(client: EngineClient) -> None:
        engine.hold()
        first = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        tokens = unpack_tokens((await anext(first)).tokens).tolist()
        engine.frozen.set()
        engine.running.set()
        second = client.submit(name="b", prompt=PROMPT, sampling=SAMPLING)
        while client.trouble is None:
            await asyncio.sleep(0.01)
        assert "has not answered for" in client.trouble and client.death is None and client.live_count == 2
        engine.frozen.clear()
        for stream, reported in ((first, tokens), (second, [])):
            async for output in stream:
                reported += unpack_tokens(output.tokens).tolist()
            assert reported == list(range(10, 110))
        while client.trouble is not None:
            await asyncio.sleep(0.01)
        assert len(engine.of_kind(Ping)) >= 1

    with FakeEngine(count_up) as engine:
        with_client(engine, use)
    said = [message.split()[-1] for message in caplog.messages]
    assert said[:2] == ["on.", "again."] and said == said[:2] * (len(said) // 2), "again where the machine itself stops for a while"


def test_an_idle_engine_answers_and_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.runtime.client.silence.INTERVAL_S", 0.02)

    async def use(client: EngineClient) -> None:
        while len(engine.of_kind(Ping)) < 5:
            assert client.trouble is None
            await asyncio.sleep(0.01)

    with FakeEngine(count_up) as engine:
        with_client(engine, use)


def test_closing_the_client_ends_its_streams() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        await client.close()
        with pytest.raises(EngineDead, match="closed by this process"):
            await anext(stream)

    async def run() -> None:
        await use(await EngineClient.connect(engine.address, 60.0))

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        asyncio.run(run())


def test_what_one_turn_sends_keeps_its_order_and_nothing_is_lost() -> None:
    names = [f"r{at}" for at in range(40)]

    async def run() -> None:
        client = await EngineClient.connect(engine.address, 60.0)
        for name in names:
            client.submit(name=name, prompt=PROMPT, sampling=SAMPLING)
        client.reset_prefix_cache()
        await client.close()  # in the same turn

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        asyncio.run(run())
        engine.wait_for(lambda: len(engine.of_kind(Goodbye)) == 1)
        _, *sent, reset, goodbye = [message for message in engine.received if not hasattr(message, "reason")]
        assert [message.name for message in sent] == names
        assert isinstance(reset, ResetPrefixCache) and isinstance(goodbye, Goodbye)


def test_nobody_answers() -> None:
    with FakeEngine(count_up, silent=True) as engine:
        with pytest.raises(EngineDead, match="did not answer within 0.2 s"):
            asyncio.run(EngineClient.connect(engine.address, 0.2))
        with pytest.raises(EngineDead, match="did not answer within 0.2 s"):
            SyncEngineClient.connect(engine.address, 0.2)


def test_an_unreadable_message_is_a_dead_engine() -> None:
    async def use(client: EngineClient) -> None:
        stream = client.submit(name="a", prompt=PROMPT, sampling=SAMPLING)
        engine._last_words.append(request("not for a client"))
        with pytest.raises(EngineDead, match="cannot read"):
            await anext(stream)

    with FakeEngine(count_up) as engine:
        engine.running.clear()
        with_client(engine, use)


def test_sync_run_gives_all_outputs() -> None:
    with FakeEngine(count_up) as engine, SyncEngineClient.connect(engine.address, 60.0) as client:
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        for output in client.run([request("a"), request("b", Sampling(seed=1, max_tokens=3))]):
            tokens[output.name] += unpack_tokens(output.tokens).tolist()
        assert tokens == {"a": list(range(10, 110)), "b": [10, 11, 12]}
        assert client.ready.world_size == 1 and client.death is None
        wait_until(lambda: client.stats is not None)
        assert list(client.run([])) == []


def test_sync_run_of_whole_answers_waits_for_ends() -> None:
    """What has come of the longer answer by then is given as well, and the rest in one piece."""
    with FakeEngine(count_up) as engine, SyncEngineClient.connect(engine.address, 60.0) as client:
        outputs = list(client.run([request("a"), request("b", Sampling(seed=1, max_tokens=3))], whole=True))
    assert [output.finish for output in outputs if output.name == "b"] == ["length"]
    pieces = [unpack_tokens(output.tokens).tolist() for output in outputs if output.name == "a"]
    assert sum(pieces, []) == list(range(10, 110)) and len(pieces) <= 2


def test_sync_abort_close_and_refusal() -> None:
    def refuse(submitted: SubmitRequest) -> str | None:
        return "no room" if submitted.name == "bad" else None

    with FakeEngine(count_up, refuse) as engine, SyncEngineClient.connect(engine.address, 60.0) as client:
        with pytest.raises(Refused, match="no room"):
            list(client.run([request("bad")]))
        engine.running.clear()
        outputs = client.run([request("a"), request("b")])
        client.abort(["a"], "stop")
        engine.hold()
        assert next(outputs).name in "ab"
        outputs.close()
        assert "b" in engine.wait_aborts("client")
        client.reset_prefix_cache()
        engine.wait_for(lambda: len(engine.of_kind(ResetPrefixCache)) == 1)


def test_sync_client_of_a_lost_engine() -> None:
    with FakeEngine(count_up) as engine, SyncEngineClient.connect(engine.address, 60.0) as client:
        engine.hold()
        outputs = client.run([request("a", Sampling(seed=1, max_tokens=400))])
        next(outputs)
        engine.close()
        with pytest.raises(EngineDead, match="lost"):
            list(outputs)
        client.close()
        with pytest.raises(EngineDead, match="This program has closed the engine: start another one"):
            list(client.run([request("b")]))
