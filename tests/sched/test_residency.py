"""Which adapter is loaded next, and which one makes room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vnext.sched.residency import Load, next_load
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    EngineStarted,
    RequestArrived,
    RequestId,
    StepCommitted,
    pack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State


def engine(slots: int, rows: int = 4) -> State:
    config = SchedulerConfig(
        block_size=4, page_count=64, max_num_batched_tokens=64, max_num_seqs=rows, max_model_len=32, pipeline_depth=1,
        max_loras=slots,
    )  # fmt: skip
    return start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))


def arrival(state: State, adapter: str, max_tokens: int = 1) -> RequestArrived:
    sampling = Sampling(seed=1, max_tokens=max_tokens, adapter=adapter)
    return RequestArrived(
        id=RequestId(state.next_id), name="", prompt=pack_tokens([1, 2, 3]), sampling=sampling, priority=0, arrival_ns=0
    )


def with_requests(state: State, adapters: Sequence[str], max_tokens: int = 1) -> State:
    for adapter in adapters:
        state = reduce(state, arrival(state, adapter, max_tokens))
    return state


def loaded(state: State, *digests: str) -> State:
    for digest in digests:
        wish = next_load(state)
        assert wish is not None and wish.digest == digest
        for event in wish.events(digest):
            state = reduce(state, event)
    return state


def step(state: State) -> State:
    """One step, planned and committed."""
    plan = schedule(state)
    assert plan is not None
    state = reduce(state, plan)
    return reduce(state, StepCommitted(step=plan.step, tokens=pack_tokens([5] * int(state.in_flight[0].samples.sum()))))


def test_a_request_waits_for_its_slot_and_for_nothing_else() -> None:
    state = with_requests(engine(2), ["a", "", "b"])
    assert schedule(state) is None and next_load(state) == Load("a", 0, False)
    state = loaded(state, "a")
    plan = schedule(state)
    assert plan is not None and [place for place, _ in plan.admitted] == [0, 1], "b's adapter is in no slot yet"
    state = step(loaded(state, "b"))
    assert not state.requests and [slot and slot.digest for slot in state.slots] == ["a", "b"]


def test_the_least_recently_used_makes_room() -> None:
    state = engine(2)
    for adapter in ("a", "b", "a"):
        state = with_requests(state, [adapter])
        state = step(loaded(state, adapter) if next_load(state) else state)
    state = with_requests(state, ["c"])
    assert next_load(state) == Load("c", 1, True)


def test_what_runs_or_comes_first_keeps_its_slot() -> None:
    state = with_requests(engine(2), ["a"], max_tokens=9)
    state = step(loaded(state, "a"))
    state = step(loaded(with_requests(state, ["b"]), "b"))
    state = with_requests(state, ["b", "c"])
    assert next_load(state) is None, "a runs, and b is needed before c"
    assert next_load(with_requests(step(state), ["d"])) == Load("c", 1, True)


def test_more_requests_than_are_looked_at() -> None:
    state = with_requests(engine(1), ["a"] * 5 + ["b"])
    assert next_load(loaded(state, "a")) is None


@pytest.mark.parametrize(
    "event, sentence",
    [
        (AdapterLoaded(name="", digest="b", slot=0), "slot 0 holds another adapter"),
        (AdapterLoaded(name="", digest="a", slot=1), "adapter 'a' has a slot already"),
        (AdapterLoaded(name="", digest="b", slot=2), "there is no slot 2"),
        (AdapterLoaded(name="", digest="", slot=1), "adapter '' has a slot already"),
        (AdapterEvicted(slot=0), "running requests use the adapter in slot 0"),
        (AdapterEvicted(slot=1), "slot 1 holds no adapter"),
        (AdapterEvicted(slot=-1), "slot -1 holds no adapter"),
    ],
)
def test_illegal_events(event: AdapterLoaded | AdapterEvicted, sentence: str) -> None:
    state = step(loaded(with_requests(engine(2), ["a"], max_tokens=9), "a"))
    with pytest.raises(IllegalEvent, match=sentence):
        reduce(state, event)


def test_an_engine_without_slots_refuses_adapters() -> None:
    state = engine(0)
    assert "start it with --enable-lora" in str(refusal(state.config, arrival(state, "a")))
    assert refusal(state.config, arrival(state, "")) is None
