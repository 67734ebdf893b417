"""What the law costs: one steady decode step of the state machine, and the plan's event on its way.

`python -m pytest perf/bench_state.py`. No model, process or channel: reducer and scheduler alone, as the engine core runs
them in asynchronous mode (plan t+1, then commit t). Prompts have 512 to 527 tokens, so that at block size 16 each step
one row in sixteen completes a block and takes a new one; the prefix cache is on.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

PROMPT_LENGTH = 512
BLOCK_SIZE = 16
VOCABULARY = 32_000
STEPS_MAX = 1_200
ROUNDS = 400
RUNNING = (32, 256, 1024)

running = pytest.mark.parametrize("request_count", RUNNING)


def empty_engine(request_count: int) -> State:
    length = PROMPT_LENGTH + BLOCK_SIZE + STEPS_MAX
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        block_count=request_count * (length // BLOCK_SIZE + 2),
        batch_tokens_max=8192,
        running_max=request_count,
        model_len_max=length + 1,
        vocab_size=VOCABULARY,
    )
    return start(
        EngineStarted(config=config, model="none", model_digest="", world_size=1, environment={}, started_ns=0)
    )


def arrivals(request_count: int) -> Iterator[RequestArrived]:
    chance = np.random.default_rng(0)
    for index in range(request_count):
        prompt = chance.integers(3, VOCABULARY, PROMPT_LENGTH + index % BLOCK_SIZE)
        sampling = Sampling(seed=index, max_tokens=STEPS_MAX, ignore_eos=True)
        yield RequestArrived(
            id=RequestId(index), name=str(index), prompt=pack_tokens(prompt), sampling=sampling, priority=0, arrival_ns=0
        )


def committed(state: State) -> StepCommitted:
    """The oldest step's result: any tokens serve, one for each row that samples."""
    flight = state.flights[0]
    return StepCommitted(step=flight.step, tokens=pack_tokens(np.full(int(flight.samples.sum()), 7)))


def advance(state: State) -> State:
    """Plan the next step, then commit the oldest: the order of events in asynchronous mode."""
    state = reduce(state, schedule(state))
    return reduce(state, committed(state))


def steady_decode(request_count: int) -> State:
    """All requests past their prompts and one step in flight, as every later state will be."""
    state = empty_engine(request_count)
    for event in arrivals(request_count):
        state = reduce(state, event)
    state = reduce(state, schedule(state))
    while state.waiting or int((state.rows.known - state.rows.computed).max()) > 1:
        state = advance(state)
    assert len(state.rows) == request_count
    return state


@running
def test_step(benchmark, request_count: int) -> None:
    """schedule + reduce(StepPlanned) + reduce(StepCommitted)."""
    state = steady_decode(request_count)

    def step() -> None:
        nonlocal state
        state = advance(state)

    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=32)
    assert len(state.rows) == request_count, "the benchmark left its steady state"


@running
def test_schedule(benchmark, request_count: int) -> None:
    """The decision alone."""
    state = steady_decode(request_count)
    plan = benchmark(schedule, state)
    assert plan == StepPlanned(step=state.planned), "a steady step is the expected one"


@running
def test_digest(benchmark, request_count: int) -> None:
    """What a rank computes every `digest_interval` steps."""
    benchmark(digest, steady_decode(request_count))


@running
def test_plan_encode(benchmark, request_count: int) -> None:
    """The plan's event as bytes; a steady plan's size does not depend on the batch."""
    plan = schedule(steady_decode(request_count))
    data = benchmark(msgspec.msgpack.Encoder().encode, plan)
    benchmark.extra_info["plan_bytes"] = len(data)


@running
def test_plan_decode(benchmark, request_count: int) -> None:
    """The same bytes as an event again, in the union of all events as a rank reads it."""
    plan = schedule(steady_decode(request_count))
    data = msgspec.msgpack.encode(plan)
    assert benchmark(msgspec.msgpack.Decoder(AnyEvent).decode, data) == plan
