"""Several engines as one client: where requests go, what becomes of them when an engine ends, and operations on all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine

from vnext.replay.answers.routing import routing
from vnext.runtime.client.engines import connect_engines
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.client.replicas import Replicas, _own
from vnext.runtime.protocol.messages import (
    SALT_END,
    AbortRequests,
    EngineDied,
    Operate,
    Operated,
    ResetPrefixCache,
    SubmitRequest,
    derived_seed,
)
from vnext.runtime.protocol.operations import CallRanks, PauseEngine, UpdateWeights
from vnext.runtime.record.retention import PART
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling

SAMPLING = Sampling(seed=1, max_tokens=100)
EXPECTED = list(range(10, 110))


def count_up(submitted: SubmitRequest) -> list[int]:
    return list(range(10, 10 + submitted.sampling.max_tokens))


def an_engine(address: str = "", **ready: Any) -> FakeEngine:
    return FakeEngine(count_up, address=address, **{"max_restarts": 3, "root_seed": 9} | ready)


def request(name: str, prompt: int = 5, **others: Any) -> SubmitRequest:
    return SubmitRequest(**{"name": name, "prompt": pack_tokens([prompt, 6, 7, 8]), "sampling": SAMPLING} | others)


def submitted(engine: FakeEngine) -> list[str]:
    return [each.name for each in engine.of_kind(SubmitRequest)]


def aborted(engine: FakeEngine) -> list[str]:
    return [name for each in engine.of_kind(AbortRequests) for name in each.names]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never came true")


async def tokens_of(stream: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    async for output in stream:
        found.setdefault(output.name, []).extend(unpack_tokens(output.tokens).tolist())
    return found


def with_two(use: Callable[[Replicas, FakeEngine, FakeEngine], Coroutine[Any, Any, None]], **ready: Any) -> None:
    async def run(first: FakeEngine, second: FakeEngine) -> None:
        client = await connect_engines((first.address, second.address), 5.0)
        assert isinstance(client, Replicas)
        try:
            await use(client, first, second)
        finally:
            await client.close()

    with an_engine(**ready) as first, an_engine(**ready) as second:
        asyncio.run(run(first, second))


def test_requests_are_shared_and_those_of_one_prompt_go_to_one_engine() -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        streams = [client.submit_all([request(f"{prompt}-{place}", prompt) for place in range(3)]) for prompt in range(2)]
        await until(lambda: len(submitted(first) + submitted(second)) == 6)
        assert sorted([submitted(first), submitted(second)]) == [["0-0", "0-1", "0-2"], ["1-0", "1-1", "1-2"]]
        assert client.live_count == 6
        with pytest.raises(ValueError, match="unique"):
            client.submit_all([request("1-1")])
        client.abort(["0-1", "nobody"], "stop")
        streams[1].close()
        await until(lambda: sorted(aborted(first) + aborted(second)) == ["0-1", "1-0", "1-1", "1-2"])
        first.running.set(), second.running.set()
        assert await tokens_of(streams[0]) == {"0-0": EXPECTED, "0-1": [], "0-2": EXPECTED}
        client.reset_prefix_cache()
        await until(lambda: bool(first.of_kind(ResetPrefixCache) and second.of_kind(ResetPrefixCache)))

    with_two(use)


def test_requests_of_an_engine_that_ends_go_on_at_another() -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        streams = [client.submit_all([request(str(place), place)]) for place in range(4)]
        await until(lambda: len(submitted(first)) == len(submitted(second)) == 2)
        first.hold(3), second.hold(3)
        taken = [await anext(stream) for stream in streams]
        await until(lambda: all(len(live.tokens) == 3 for each in client.engines for live in each.live))
        known = {live.request.name: live.tokens.tolist() for live in client.engines[0].live}
        await asyncio.to_thread(first.close)
        await until(lambda: len(submitted(second)) == 4)
        moved = second.of_kind(SubmitRequest)[2:]
        assert {each.name: unpack_tokens(each.generated).tolist() for each in moved} == known
        assert [each.deaths for each in moved] == [1, 1]
        assert client.trouble is None and client.recovering == "" and "Engine 0" not in str(client.trouble)
        second.running.set()
        for stream, output in zip(streams, taken):
            assert unpack_tokens(output.tokens).tolist() + (await tokens_of(stream))[output.name] == EXPECTED
        with an_engine(first.address) as again:
            await until(lambda: client.engines[0].is_up)
            assert await tokens_of(client.submit_all([request("new"), request("newer", 7)])) == {"new": EXPECTED, "newer": EXPECTED}
            assert submitted(again) and client.recoveries == 1

    with_two(use)


def test_requests_wait_only_while_every_engine_has_ended_and_for_the_first_that_comes() -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        streams = {str(place): client.submit_all([request(str(place), place)]) for place in range(4)}
        await until(lambda: len(submitted(first)) == len(submitted(second)) == 2)
        at_first, at_second = submitted(first), submitted(second)
        await asyncio.to_thread(second.close)
        await until(lambda: len(submitted(first)) == 4)
        await asyncio.to_thread(first.close)
        await until(lambda: client.recovering != "")
        assert client.trouble is not None and "Engine 0: " in client.trouble and "Engine 1: " in client.trouble
        assert client.death is None
        streams["late"] = client.submit_all([request("late", 9)])
        with an_engine(second.address) as again:
            for name in (*at_first, "late"):
                assert await tokens_of(streams[name]) == {name: EXPECTED}
            assert sorted(submitted(again)) == sorted([*at_first, "late"]) and client.trouble is None
            with an_engine(first.address) as last:
                for name in at_second:
                    assert await tokens_of(streams[name]) == {name: EXPECTED}
                assert [each.deaths for each in last.of_kind(SubmitRequest)] == [2, 2], "two engine cores have lost them"

    with_two(use)


def test_what_two_engine_cores_have_lost_waits_for_the_successor_of_the_last() -> None:
    """It may be what ends them: a third one is not put at risk."""

    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        stream = client.submit_all([request("suspect")])
        await until(lambda: submitted(first) + submitted(second) == ["suspect"])
        owner = first if submitted(first) else second
        other = second if owner is first else first
        await asyncio.to_thread(owner.close)
        await until(lambda: submitted(other) == ["suspect"])
        with an_engine(owner.address) as third:
            await until(lambda: all(each.is_up for each in client.engines))
            await asyncio.to_thread(other.close)
            await until(lambda: not all(each.is_up for each in client.engines))
            assert await tokens_of(client.submit_all([request("fine", 9)])) == {"fine": EXPECTED}
            assert submitted(third) == ["fine"]
            with an_engine(other.address) as fourth:
                assert await tokens_of(stream) == {"suspect": EXPECTED}
                assert [each.deaths for each in fourth.of_kind(SubmitRequest)] == [2]

    with_two(use)


def test_an_engine_that_ends_for_good_leaves_its_requests_to_the_others() -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        stream = client.submit_all([request(str(place), place) for place in range(4)])
        await until(lambda: len(submitted(first)) == len(submitted(second)) == 2)
        first.say(EngineDied(message="The engine stopped: its disk is full"))
        first.running.set()
        await until(lambda: len(submitted(second)) == 4)
        second.running.set()
        assert await tokens_of(stream) == dict.fromkeys("0123", EXPECTED)
        assert client.death is None and client.trouble is None and client.engines[0].death is not None
        assert await tokens_of(client.submit_all([request("new")])) == {"new": EXPECTED}
        second.running.clear()
        last = client.submit_all([request("last")])
        await asyncio.to_thread(second.close)
        with pytest.raises(EngineDead):
            await tokens_of(last)
        assert client.death is not None and "its disk is full" in client.death and "Engine 1: " in client.death
        with pytest.raises(EngineDead):
            client.submit_all([request("later")])

    with_two(use, max_restarts=0)


def test_requests_wait_for_the_one_engine_that_is_started_again_when_the_other_ends_for_good() -> None:
    """Those that two engine cores have lost too: no successor of the last one tries them."""

    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        first.running.clear(), second.running.clear()
        streams = {str(place): client.submit_all([request(str(place), place)]) for place in range(4)}
        await until(lambda: len(submitted(first)) == len(submitted(second)) == 2)
        await asyncio.to_thread(second.close)
        await until(lambda: len(submitted(first)) == 4)
        first.say(EngineDied(message="The engine stopped: its disk is full"))
        first.running.set()
        await until(lambda: client.recovering != "")
        assert client.death is None
        with an_engine(second.address):
            for name, stream in streams.items():
                assert await tokens_of(stream) == {name: EXPECTED}

    with_two(use)


def test_seeds_are_those_of_one_engine_and_differ_between_processes() -> None:
    async def use(number: int) -> list[int]:
        with ExitStack() as stack:
            engines = [stack.enter_context(an_engine()) for _ in range(2)]
            client = await connect_engines([each.address for each in engines], 5.0, number=number)
            stream = client.submit_all([request(str(place), place, has_seed=place == 1) for place in range(4)])
            await tokens_of(stream)
            await client.close()
            sent = sorted((each for engine in engines for each in engine.of_kind(SubmitRequest)), key=lambda each: each.name)
            assert all(each.has_seed for each in sent)
            return [each.sampling.seed for each in sent]

    of_one = [derived_seed(9, 0), 1, derived_seed(9, 2), derived_seed(9, 3)]
    assert asyncio.run(use(0)) == of_one
    others = [asyncio.run(use(number)) for number in (1, 2)]
    assert others[0][1] == 1 and len({of_one[0], others[0][0], others[1][0]}) == 3


def answer_operations(engine: FakeEngine, error: str, value: Any) -> None:
    """The next operation's answer, sent when it has come."""
    engine.wait_for(lambda: len(engine.of_kind(Operate)) == 1)
    engine.say(Operated(name=engine.of_kind(Operate)[0].name, error=error, value=msgspec.json.encode(value)))


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        (("", ""), None),
        (("", "the disk is full"), "engine 1: the disk is full; done by engine 0"),
        (("no such mode", "no such mode"), "no such mode"),
    ],
)
def test_an_operation_is_for_all_engines(errors: tuple[str, str], raised: str | None) -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        answering = [asyncio.to_thread(answer_operations, *each) for each in zip((first, second), errors, ([1], [2, 3]))]
        asked = asyncio.ensure_future(client.operate(CallRanks(function="process_id")))
        await asyncio.gather(*answering)
        if raised is None:
            assert await asked == [1, 2, 3]
        else:
            with pytest.raises(NotDone) as found:
                await asked
            assert str(found.value).startswith(raised)

    with_two(use)


def test_no_engine_is_asked_while_one_is_started_again() -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        await asyncio.to_thread(second.close)
        await until(lambda: not client.engines[1].is_up)
        with pytest.raises(NotDone, match="engine 1 is being started again"):
            await client.operate(PauseEngine())
        assert first.of_kind(Operate) == []

    with_two(use)


def test_a_file_of_weights_is_each_engine_s_own(tmp_path: Path) -> None:
    (first := tmp_path / "0").mkdir(), (second := tmp_path / "1").mkdir()
    (first / "weights.a.safetensors").write_bytes(b"numbers")
    operation = UpdateWeights(paths=(str(first / "weights.a.safetensors"), "/checkpoints/step-1"))
    other = _own(operation, first, second)
    assert isinstance(other, UpdateWeights) and other.paths == (str(second / "weights.a.safetensors"), "/checkpoints/step-1")
    (first / "weights.a.safetensors").unlink()
    assert Path(other.paths[0]).read_bytes() == b"numbers"
    assert _own(PauseEngine(), first, second) == PauseEngine()


def test_decisions_are_recorded_beside_the_first_engines_log(tmp_path: Path) -> None:
    async def use(client: Replicas, first: FakeEngine, second: FakeEngine) -> None:
        for place in range(3):
            assert await tokens_of(client.submit_all([request(str(place), place)])) == {str(place): EXPECTED}

    with_two(use, log_dir=str(tmp_path))
    answer, ended = routing(tmp_path)
    assert (answer.decisions, answer.differing, answer.recorded_policy) == (3, 0, "prefix") and ended.is_sound
    assert sum(each.requests for each in answer.replicas) == 3 and [each.name for each in answer.replicas] == ["engine 0", "engine 1"]
    assert all(PART.fullmatch(path.name) for path in tmp_path.iterdir()), "retention may delete them with the log"
    with_two(use, log_dir=str(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_what_keeps_requests_together_is_what_a_client_gave_not_its_tenant() -> None:
    async def run(first: FakeEngine, second: FakeEngine) -> None:
        client = await connect_engines((first.address, second.address), 5.0, "consistent_hash")
        try:
            for number in range(24):
                await tokens_of(client.submit_all([request(f"p{number}", number, cache_salt=f"tenant{SALT_END}")]))
                await tokens_of(client.submit_all([request(f"s{number}", number, cache_salt=f"tenant{SALT_END}session")]))
        finally:
            await client.close()
        found = [{name[0] for name in submitted(engine)} for engine in (first, second)]
        assert sorted(map(sorted, found)) == [["p"], ["p", "s"]]

    with an_engine() as first, an_engine() as second:
        asyncio.run(run(first, second))
