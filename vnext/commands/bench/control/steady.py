"""A steady engine of a given number of requests: the state between two decode steps, without model, process or channel.

Prompts have 512 to 527 tokens, where nothing else is said, so at block size 16 one row in sixteen completes a block each step and
takes a new one. Steps go as in asynchronous mode (plan t+1, then commit t), with the cheap laws checked. The prefix cache is on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted, pack_tokens
from vnext.state.laws import check_cheap
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

PROMPT_LENGTH = 512
BLOCK_SIZE = 16
VOCABULARY = 32_000
STEPS_MAX = 1_200


def started(config: SchedulerConfig) -> State:
    return start(EngineStarted(config=config, model="none", model_digest="", world_size=1, environment={}, started_ns=0))


def empty_engine(request_count: int, prompt_length: int = PROMPT_LENGTH) -> State:
    """A new engine with room for `request_count` requests to the end."""
    length = prompt_length + BLOCK_SIZE + STEPS_MAX
    return started(SchedulerConfig(
        block_size=BLOCK_SIZE,
        page_count=request_count * (length // BLOCK_SIZE + 2),
        max_num_batched_tokens=8192,
        max_num_seqs=request_count,
        max_model_len=length + 1,
        vocab_size=VOCABULARY,
    ))  # fmt: skip


def arrivals(request_count: int, prompt_length: int = PROMPT_LENGTH) -> Iterator[RequestArrived]:
    """Requests with random prompts, the same for every engine."""
    rng = np.random.default_rng(0)
    for index in range(request_count):
        prompt = rng.integers(3, VOCABULARY, prompt_length + index % BLOCK_SIZE)
        sampling = Sampling(seed=index, max_tokens=STEPS_MAX, ignore_eos=True)
        yield RequestArrived(
            id=RequestId(index), name=str(index), prompt=pack_tokens(prompt), sampling=sampling, priority=0, arrival_ns=0
        )


def committed(state: State) -> StepCommitted:
    """The oldest step's result: arbitrary tokens, one for each row that samples."""
    scheduled = state.in_flight[0]
    return StepCommitted(step=scheduled.step, tokens=pack_tokens(np.full(int(scheduled.samples.sum()), 7)))


def planned(state: State) -> AnyEvent:
    """The next step, which a state with work has."""
    plan = schedule(state)
    assert plan is not None, "there is nothing to do"
    return plan


def advance(state: State) -> State:
    """Plan the next step, then commit the oldest."""
    state = reduce(state, planned(state))
    check_cheap(state)
    state = reduce(state, committed(state))
    check_cheap(state)
    return state


def steady_decode(request_count: int, prompt_length: int = PROMPT_LENGTH) -> State:
    """A state with all prompts computed and one step in flight, like every later state."""
    state = empty_engine(request_count, prompt_length)
    for event in arrivals(request_count, prompt_length):
        state = reduce(state, event)
    state = reduce(state, planned(state))
    while state.waiting or int((state.rows.known - state.rows.computed).max()) > 1:
        state = advance(state)
    assert len(state.rows) == request_count
    return state
