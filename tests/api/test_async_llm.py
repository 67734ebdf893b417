"""Tests of AsyncLLM: the answers of LLM, from any loops and threads, and nothing left of a request that is not wanted any more."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_here import engines_here

from vnext import AsyncLLM, EngineDead, Generated, InvalidRequest, RequestOutputKind, SamplingParams
from vnext.runtime.client.bridged_stream import BridgedStream
from vnext.runtime.engine.executor import InprocExecutor
from vnext.runtime.processes import rank_processes
from vnext.runtime.protocol.operations import CallRanks

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, skip_special_tokens=False)
LONG = msgspec.structs.replace(GREEDY, max_tokens=900)
START_CORE = rank_processes.start_core
PROMPTS = ["What is", "The module", "Return a", "import"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with engines_here():
        engine = AsyncLLM(executor="inproc", threads=1, seed=11, log_dir=tmp_path_factory.mktemp("logs"))
        yield engine
        engine.close()


class Gate:
    """Where an engine core of this process waits before each step: open, or for so many steps."""

    def __init__(self) -> None:
        self._news, self._left = threading.Condition(), 10**9

    def let(self, steps: int = 10**9) -> None:
        with self._news:
            self._left = steps
            self._news.notify_all()

    def pass_one(self) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._left > 0, 60), "nobody opens the gate"
            self._left -= 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A request has begun and cannot end, however late this test looks: the engine takes a few steps and waits for `let`."""
    gate, send = Gate(), InprocExecutor.send

    def send_through(executor: InprocExecutor, message: bytes) -> None:
        gate.pass_one()
        send(executor, message)

    monkeypatch.setattr(InprocExecutor, "send", send_through)
    gate.let(8)
    yield gate
    gate.let()


async def outputs_of(engine: AsyncLLM, prompt, params: SamplingParams = GREEDY, **more) -> list[Generated]:
    return [output async for output in engine.generate(prompt, params, **more)]


def wait_until_idle(engine: AsyncLLM) -> None:
    """Nothing is live, neither here nor in the engine core."""
    deadline_s = time.monotonic() + 60
    client = engine.llm._client
    while client._client.live_count:
        assert time.monotonic() < deadline_s, f"{client._client.live_count} requests are live"
        time.sleep(0.01)
    client.operate(CallRanks(function="process_id", arguments={}))  # the engine core's figures come before its answer
    while client.stats.running or client.stats.waiting:
        assert time.monotonic() < deadline_s, f"{client.stats.running} requests run in the engine core"
        time.sleep(0.01)
    assert not engine._requests


@pytest.fixture
def prompt_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer takes each output before the client's thread passes on another: how many there are does not depend on its speed."""

    def patient(put):
        def put_and_wait(stream: BridgedStream, *output: Any) -> bool:
            is_ready, deadline_s = put(stream, *output), time.monotonic() + 60
            while stream._pending:
                assert time.monotonic() < deadline_s, "nobody takes the output"
                time.sleep(0.0005)
            return is_ready

        return put_and_wait

    monkeypatch.setattr(BridgedStream, "output", patient(BridgedStream.output))
    monkeypatch.setattr(BridgedStream, "token", patient(BridgedStream.token))


@pytest.mark.usefixtures("prompt_reader")
def test_outputs_grow_to_the_answer_of_llm(engine: AsyncLLM) -> None:
    params = msgspec.structs.replace(GREEDY, n=2, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0)
    *begun, last = asyncio.run(outputs_of(engine, "The module", params, request_id="mine"))
    (whole,) = engine.llm.generate("The module", params, use_tqdm=False)
    assert (last.request_id, last.finished, last.outputs) == ("mine", True, whole.outputs)
    assert (last.prompt, last.prompt_token_ids) == ("The module", whole.prompt_token_ids)
    assert last.prompt_logprobs == whole.prompt_logprobs
    assert len(begun) == 2 * 24 - 1
    for output in begun:
        assert not output.finished and output.request_id == "mine"
        for part, answer in zip(output.outputs, whole.outputs):
            assert answer.text.startswith(part.text) and answer.token_ids[: len(part.token_ids)] == part.token_ids
            assert part.logprobs == answer.logprobs[: len(part.token_ids)]
            assert part.finish_reason in (None, answer.finish_reason)
    assert [len(output.outputs[0].token_ids) for output in begun] == sorted(len(each.outputs[0].token_ids) for each in begun)


@pytest.mark.usefixtures("prompt_reader")
def test_deltas_add_up_to_the_answer_of_llm(engine: AsyncLLM) -> None:
    params = msgspec.structs.replace(GREEDY, n=3, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=0)
    (whole,) = engine.llm.generate("The module", params, use_tqdm=False)
    deltas = asyncio.run(outputs_of(engine, "The module", msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)))
    assert len(deltas) == 3 * 24 and [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    scores = [output.prompt_logprobs for output in deltas if output.prompt_logprobs]
    assert scores == [whole.prompt_logprobs] and all(output.outputs for output in deltas)
    for answer in whole.outputs:
        parts = [part for output in deltas for part in output.outputs if part.index == answer.index]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        assert [row for part in parts for row in part.logprobs] == answer.logprobs
        assert parts[-1].cumulative_logprob == answer.cumulative_logprob
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [answer.finish_reason]


async def taken_slowly(engine: AsyncLLM, gate: Gate, params: SamplingParams) -> list[Generated]:
    """One output of an answer, and what follows once all of it is there."""
    found = []
    async for output in engine.generate("The module", params):
        found.append(output)
        gate.let()
        while engine.llm._client._client.live_count:
            await asyncio.sleep(0.001)
    return found


def test_a_slow_consumer_of_deltas_gets_all_of_the_answer(engine: AsyncLLM, gate: Gate) -> None:
    params = msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.DELTA, stop="zzzz")

    parts = [output.outputs[0] for output in asyncio.run(taken_slowly(engine, gate, params))]
    assert len(parts) == 2
    (whole,) = engine.llm.generate("The module", params, use_tqdm=False)
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.token_ids] == whole.outputs[0].token_ids


def test_an_output_at_the_end_only(engine: AsyncLLM) -> None:
    params = msgspec.structs.replace(GREEDY, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    (only,) = asyncio.run(outputs_of(engine, "import", params))
    for kind in RequestOutputKind:  # LLM has whole answers whatever the kind
        (whole,) = engine.llm.generate("import", msgspec.structs.replace(params, output_kind=kind), use_tqdm=False)
        assert only.finished and only.outputs == whole.outputs


@pytest.mark.parametrize("kind", ["delta", 1, None])
def test_another_kind_of_output_is_refused(kind: object) -> None:
    with pytest.raises(InvalidRequest, match="output_kind is .*: it must be one of RequestOutputKind.CUMULATIVE, "):
        SamplingParams(output_kind=kind)


def test_a_stop_string_ends_the_stream(engine: AsyncLLM) -> None:
    text = engine.llm.generate("What is", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    last = asyncio.run(outputs_of(engine, "What is", msgspec.structs.replace(GREEDY, stop=stop)))[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == (text.partition(stop)[0], "stop", stop)
    wait_until_idle(engine)


def test_a_conversation(engine: AsyncLLM) -> None:
    conversation = [{"role": "user", "content": "What is Python?"}]

    async def last() -> Generated:
        return [output async for output in engine.chat(conversation, GREEDY)][-1]

    assert asyncio.run(last()).outputs == engine.llm.chat(conversation, GREEDY, use_tqdm=False)[0].outputs


def test_many_loops_in_many_threads(engine: AsyncLLM) -> None:
    """Each answer is the one that LLM gives, which another thread asks meanwhile."""
    alone = {prompt: engine.llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs for prompt in PROMPTS}
    found: list[tuple[str, object]] = []

    async def several() -> None:
        for each in await asyncio.gather(*(outputs_of(engine, prompt) for prompt in PROMPTS * 3)):
            found.append((each[-1].prompt, each[-1].outputs))

    threads = [threading.Thread(target=asyncio.run, args=(several(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        found += [(each.prompt, each.outputs) for each in engine.llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 12 + 5 * 4 and all(outputs == alone[prompt] for prompt, outputs in found)
    wait_until_idle(engine)


def test_leaving_the_loop_aborts(engine: AsyncLLM, gate: Gate) -> None:
    async def leave() -> None:
        async for _ in engine.generate("The module", LONG):
            break
        while engine.llm._client.stats.aborted == before:  # a step or so at a time: what is left of it takes none of the next one's
            gate.let(1)
            await asyncio.sleep(0.01)
        gate.let(8)
        kept = engine.generate("The module", LONG)
        await anext(kept)
        await kept.aclose()
        gate.let(0)
        waiting = asyncio.create_task(outputs_of(engine, "The module", LONG, request_id="waiting"))
        while not (sent := engine._requests.get("waiting")) or not sent.names:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.let()

    wait_until_idle(engine)
    before = engine.llm._client.stats.aborted
    asyncio.run(leave())
    wait_until_idle(engine)
    assert engine.llm._client.stats.aborted == before + 3


@pytest.mark.parametrize("turns", [*range(8), 20, 60])
def test_a_task_may_be_cancelled_at_any_moment(engine: AsyncLLM, turns: int) -> None:
    """Also while the prompt is encoded, or as the request is on its way to the client's thread."""

    async def cancelled() -> None:
        tasks = [asyncio.create_task(outputs_of(engine, prompt, LONG)) for prompt in PROMPTS * 4]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancelled())
    wait_until_idle(engine)


def test_a_loop_that_ends_leaves_nothing(engine: AsyncLLM) -> None:
    """One that was left with answers in progress, closed or forgotten."""

    async def begin() -> object:
        stream = engine.generate("The module", LONG)
        await anext(stream)
        return stream

    asyncio.run(begin())
    wait_until_idle(engine)
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(begin())
    loop.close()
    time.sleep(0.2)
    del kept
    gc.collect()
    deadline_s = time.monotonic() + 60
    while engine.llm._client._client.live_count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_abort_by_name(engine: AsyncLLM, gate: Gate) -> None:
    async def aborted() -> list[Generated]:
        found = []
        async for output in engine.generate("The module", msgspec.structs.replace(LONG, n=2), request_id="gone"):
            found.append(output)
            await engine.abort(["gone", "unknown"])
            gate.let()
        return found

    found = asyncio.run(aborted())
    assert found[-1].finished and [each.finish_reason for each in found[-1].outputs] == ["abort", "abort"]
    assert len(found[-1].outputs[0].token_ids) < 900 and not found[0].finished
    wait_until_idle(engine)


def test_abort_before_it_is_sent(engine: AsyncLLM) -> None:
    async def aborted() -> list[Generated]:
        encoding = threading.Event()
        engine._texts.submit(encoding.wait)
        waiting = asyncio.create_task(outputs_of(engine, "The module", LONG, request_id="early"))
        await asyncio.sleep(0.01)
        await engine.abort("early")
        encoding.set()
        return await waiting

    last = asyncio.run(aborted())[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort"
    wait_until_idle(engine)


def test_a_slow_consumer_gets_all_of_it(engine: AsyncLLM, gate: Gate) -> None:
    found = asyncio.run(taken_slowly(engine, gate, GREEDY))
    assert len(found) == 2 and found[-1].outputs == engine.llm.generate("The module", GREEDY, use_tqdm=False)[0].outputs


def test_a_name_belongs_to_one_request_at_a_time(engine: AsyncLLM, gate: Gate) -> None:
    async def twice() -> None:
        async for _ in engine.generate("The module", LONG, request_id="0"):
            with pytest.raises(InvalidRequest, match="request_id is '0', which a request that goes on has"):
                await anext(engine.generate("The module", LONG, request_id="0"))
            gate.let()
            assert (await outputs_of(engine, "import"))[-1].request_id != "0"
            break

    asyncio.run(twice())
    wait_until_idle(engine)
    assert asyncio.run(outputs_of(engine, "import", request_id="0"))[-1].request_id == "0"


@pytest.mark.parametrize(("prompt", "words"), [([], "no tokens"), ([10**6], "token ids lie between"), ({"a": 1}, "has the keys 'a'")])
def test_a_bad_request_is_refused(engine: AsyncLLM, prompt, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        asyncio.run(outputs_of(engine, prompt))
    wait_until_idle(engine)


def test_a_dead_engine_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what goes on and for what is asked later. It is a process of its own."""
    monkeypatch.setattr(rank_processes, "start_core", START_CORE)

    long = msgspec.structs.replace(LONG, n=16)

    async def run() -> None:
        async with await AsyncLLM.start(executor="inproc", threads=1, max_restarts=0, log_dir=tmp_path) as engine:
            await engine.check_health()
            pid = engine.llm._engine.engines[0].child.pid
            streams = [engine.generate(prompt, long) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            os.kill(pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDead, match="the engine core has ended"):
                    async for _ in stream:
                        pass
            with pytest.raises(EngineDead, match="the engine core has ended"):
                await outputs_of(engine, "The module")
            with pytest.raises(EngineDead, match="the engine core has ended"):
                await engine.check_health()

    asyncio.run(run())


def test_after_the_end(tmp_path: Path, gate: Gate) -> None:
    """Requests that go on, later ones and aborts all say so; ending may be repeated."""

    closed = threading.Event()

    def drip() -> None:
        while not closed.wait(0.01):  # so that the engine hears the word to end, and does not end the answer before
            gate.let(1)

    dripping = threading.Thread(target=drip)

    async def run() -> None:
        engine = AsyncLLM(executor="inproc", threads=1, log="off", log_dir=tmp_path)
        async with engine:
            going_on = engine.generate("The module", LONG, request_id="a")
            await anext(going_on)
            dripping.start()
        with pytest.raises(EngineDead, match="closed"):
            async for _ in going_on:
                pass
        with pytest.raises(EngineDead, match="This program has closed the engine: start another one"):
            await outputs_of(engine, "The module")
        with pytest.raises(EngineDead, match="This program has closed the engine: start another one"):
            await engine.__aenter__()
        engine.close()
        await engine.abort("a")

    with engines_here():
        asyncio.run(run())
        closed.set()
        dripping.join()


def test_vectors_and_scores_are_those_of_llm(engine: AsyncLLM) -> None:
    async def asked() -> tuple[list, list, list]:
        return await asyncio.gather(
            engine.embed(PROMPTS, dimensions=8), engine.score(PROMPTS, PROMPTS[::-1]), engine.embed([]), return_exceptions=False
        )

    vectors, scores, none = asyncio.run(asked())
    assert vectors == engine.llm.embed(PROMPTS, dimensions=8) and scores == engine.llm.score(PROMPTS, PROMPTS[::-1]) and none == []
    with pytest.raises(InvalidRequest, match="pooling is 'median'"):
        asyncio.run(engine.embed("a", pooling="median"))
    with pytest.raises(InvalidRequest, match="2 prompts and 1 answers"):
        asyncio.run(engine.score(["a", "b"], "c"))
    wait_until_idle(engine)


def test_a_cancelled_call_aborts_its_requests(engine: AsyncLLM, gate: Gate) -> None:
    client, count, length = engine.llm._client, 600, 900

    async def left() -> None:
        task = asyncio.create_task(engine.embed([[10 + at // 30, 10 + at % 30] * (length // 2) for at in range(count)]))
        while not client._client.live_count:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client._client.live_count:
            await asyncio.sleep(0.005)
        gate.let()

    before = client.stats.steps
    asyncio.run(left())
    wait_until_idle(engine)
    whole = count * length / client.ready.config.max_num_batched_tokens
    assert client.stats.steps - before < whole / 2, "the engine went on"


def test_no_call_drops_an_adapter(engine: AsyncLLM) -> None:
    """Every call that takes one refuses it where the engine serves none."""
    adapter, talk = {"lora_name": "sql", "lora_path": "x"}, [{"role": "user", "content": "a"}]
    given = {"prompt": "a", "prompts": "a", "answers": "b", "messages": talk, "lora_request": adapter}
    refused = []

    async def first(found: Any) -> None:
        await (found if inspect.iscoroutine(found) else anext(found))

    for one in (engine.llm, engine):
        for name, method in inspect.getmembers(type(one), inspect.isfunction):
            parameters = inspect.signature(method).parameters
            if not name.startswith("_") and "lora_request" in parameters:
                with pytest.raises(InvalidRequest, match="This engine serves no adapters"):
                    found = method(one, **{key: value for key, value in given.items() if key in parameters})
                    asyncio.run(first(found))
                refused.append(name)
    assert sorted(refused) == sorted(["chat", "embed", "generate", "score"] * 2)
