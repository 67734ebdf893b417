"""The persistent batch gives the same tensors as its simple twin at every step of seeded random runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from vnext.models.layers.batch import ForwardBatch
from vnext.runtime.batch import fed
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.rebuild import rebuild
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.words import fed_words
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import Allowed
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.feasibility import refusal
from vnext.state.params import Constraint, Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import StepInFlight
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens, with_rows

VOCABULARY = 23


def engine_started(rng: random.Random, grids: bool = False) -> EngineStarted:
    config = SchedulerConfig(
        block_size=rng.choice([1, 2, 4]),
        page_count=rng.randint(8, 30),
        max_num_batched_tokens=rng.randint(3, 30),
        max_num_seqs=rng.randint(1, 6),
        max_model_len=48,
        long_prefill_token_threshold=rng.choice([0, 3]),
        prefix_caching=rng.random() < 0.7,
        pipeline_depth=rng.choice([1, 2, 3]),
        policy=rng.choice(["fcfs", "priority"]),
        eos_token_ids=(0,),
        vocab_size=VOCABULARY,
    )
    windows = rng.choice([(), (), (3,), (0, 5), (6, 1, 0)])
    config = replace(config, grids=grids, windows=windows, page_count=config.page_count * max(len(windows), 1))
    return EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0)


def random_constraint(rng: random.Random) -> Constraint | None:
    """A budget of reasoning, which needs no tokenizer."""
    if rng.random() < 0.7:
        return None
    return Constraint(reasoning_end=rng.choice([(2,), (2, 3), (2, 2)]), reasoning_max=rng.choice([-1, 0, 2, 4]))


def random_sampling(rng: random.Random, constrained: bool = True) -> Sampling:
    penalised, biased = rng.random() < 0.3, rng.random() < 0.2
    return Sampling(
        seed=rng.getrandbits(64),
        max_tokens=rng.randint(1, 14),
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 4]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=1.3 if penalised else 1.0,
        presence_penalty=0.5 if penalised else 0.0,
        frequency_penalty=0.25 if penalised else 0.0,
        logit_bias=((3, 1.5), (7, -2.0)) if biased else (),
        logprobs=rng.choice([-1, -1, 0, 2]),
        min_tokens=rng.choice([0, 0, 3]) if rng.random() < 0.5 else 0,
        stop_token_ids=(5,) if rng.random() < 0.3 else (),
        ignore_eos=rng.random() < 0.2,
        constraint=random_constraint(rng) if constrained else None,
    )


def without_unread_entries(step: StepInputs, config: SchedulerConfig) -> StepInputs:
    """A row's table beyond its context and before its window is read by nobody; the persistent batch leaves old entries there."""
    forward, windows = step.forward, config.windows or (0,)
    table = seen_part(forward.block_table, forward, config.block_size, windows[0])
    groups = tuple(
        group._replace(block_table=seen_part(group.block_table, forward, config.block_size, window))
        for group, window in zip(forward.groups, windows[1:], strict=True)
    )
    return step._replace(forward=forward._replace(block_table=table, groups=groups))


def seen_part(table: np.ndarray, forward: ForwardBatch, block_size: int, window: int) -> np.ndarray:
    blocks, ends = np.arange(table.shape[1])[None, :], forward.context_lengths[:, None]
    starts = ends - np.diff(forward.query_starts)[:, None]
    last_tokens = blocks * block_size + block_size - 1
    seen = (blocks * block_size < ends) & ((last_tokens > starts - window) | (window == 0))
    return np.where(seen, table, 0)


def assert_equal_steps(fast: StepInputs, simple: StepInputs) -> None:
    for name in (*fast.forward._fields[:7], "turning", "inputs"):
        assert_equal_trees(getattr(fast.forward, name), getattr(simple.forward, name))
    assert_equal_trees(fast.forward.groups, simple.forward.groups)
    assert np.array_equal(fast.logprobs, simple.logprobs)
    assert (fast.sampling is None) == (simple.sampling is None)
    if fast.sampling is not None:
        assert_equal_trees(fast.sampling, simple.sampling)


def assert_equal_trees(left: object, right: object) -> None:
    if isinstance(left, Allowed):
        assert isinstance(right, Allowed)
        assert_equal_trees((left.rows, left.masks_of_rows()), (right.rows, right.masks_of_rows()))
    elif isinstance(left, tuple):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right):
            assert_equal_trees(one, other)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("seed", range(20))
def test_persistent_batch_equals_rebuilt_batch(seed: int) -> None:
    walk(seed, 150)


def take_drawn(
    batch: PersistentBatch, scheduled: StepInFlight, rng: random.Random, sampled: dict[tuple[int, int, int], int]
) -> np.ndarray:
    """Random tokens for what a step samples, int64[S], which the batch takes and `sampled` keeps by step and owner."""
    tokens = np.array([rng.randrange(VOCABULARY) for _ in range(int(scheduled.samples.sum()))], dtype=np.int64)
    batch.take_sampled(scheduled, tokens)
    owners = zip(scheduled.ids[scheduled.samples].tolist(), scheduled.preemption_counts[scheduled.samples].tolist())
    sampled |= {(scheduled.step, *owner): [int(token)] for owner, token in zip(owners, tokens)}
    return tokens


@pytest.mark.parametrize("seed", range(20, 30))
def test_places_of_images_equal_the_rebuilt_ones(seed: int) -> None:
    assert walk(seed, 150, grids=True) == {0, 1, 2}, "steps without images, of texts behind them, and of images themselves"


def with_images(prompt: list[int]) -> bytes:
    """A prompt in which an image in one to three rows, or a sound, begins at each 3 that has room, and goes on behind a 2 as long as
    there is."""
    found, at = np.array(prompt, np.int32), 0
    while 3 in prompt[at : max(len(prompt) - 5, 0)]:
        at, step = prompt.index(3, at), None
        while step is None or (prompt[at - 1] == 2 and at <= len(prompt) - 6):
            digest = bytes([at] * DIGEST_SIZE)
            rows = prompt[at + 1] * (prompt[at + 3] > 1)
            found[at : at + 6] = input_tokens(with_rows(digest, rows, step), 6)
            at, step = at + 6, prompt[at + 2] * 4
    return pack_tokens(found)


def walk(seed: int, step_count: int, make: Callable[[SchedulerConfig], Any] | None = None, grids: bool = False) -> set[int]:
    """A random life of an engine; every step's tensors against those that are rebuilt from the state alone.

    `make`: another batch with the same methods. Returns how many axes places had that were not positions.
    """
    rng, axes = random.Random(seed), set[int]()
    started = engine_started(rng, grids)
    state = start(started)
    words = Vocabulary(Path("no tokenizer"), VOCABULARY, started.config.eos_token_ids)
    batch = PersistentBatch(started.config, VOCABULARY, words) if make is None else make(started.config)
    sampled, results, steps, commits = {}, [], 0, {}
    while steps < step_count:
        choice = rng.random()
        if choice < 0.3:
            drawn = [rng.randrange(1, 4) for _ in range(rng.randint(1, 16))]
            prompt = with_images(drawn) if grids else pack_tokens(drawn)
            arrival = RequestArrived(
                id=state.next_id, name="", prompt=prompt, sampling=random_sampling(rng, make is None), priority=rng.randrange(3), arrival_ns=0
            )
            if len(state.requests) < 10 and refusal(state.config, arrival) is None:
                state = reduce(state, arrival)
        elif choice < 0.34 and state.next_id:
            state = reduce(state, RequestAborted(ids=(rng.randrange(state.next_id),), reason="client"))
        elif choice < 0.7 and (plan := schedule(state)) is not None:
            state = reduce(state, plan)
            scheduled, steps = state.in_flight[-1], steps + 1
            fast = without_unread_entries(batch.step_inputs(state), started.config)
            assert_equal_steps(fast, rebuild(state, sampled, VOCABULARY, words))
            axes.add(0 if fast.forward.turning is None else fast.forward.turning.ndim)
            assert fed_words(fast, started.config)[:-1] == fed.due(state, commits)
            tokens = take_drawn(batch, scheduled, rng, sampled)
            commits[scheduled.step] = StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens))
            results.append((scheduled.step, tokens))
        elif results:
            step, tokens = results.pop(0)
            state = reduce(state, StepCommitted(step=step, tokens=pack_tokens(tokens)))
    assert state.counters.generated_tokens > step_count // 3
    return axes


@pytest.mark.parametrize("grids", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_steady_steps_are_moved_on_and_equal_the_rebuilt_batch(depth: int, grids: bool) -> None:
    """Three requests decode, a fourth comes, one is aborted, one has a bias: tensors are given again where they may be."""
    config = SchedulerConfig(
        block_size=8, page_count=64, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, vocab_size=VOCABULARY,
        pipeline_depth=depth, grids=grids,
    )  # fmt: skip
    state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
    batch, rng, sampled, pending_step, newest, again = (
        PersistentBatch(config, VOCABULARY),
        random.Random(5),
        {},
        [],
        None,
        [],
    )
    late = {"logit_bias": ((2, 1.5),), "frequency_penalty": 0.5, "logprobs": 2, "min_tokens": 15, "stop_token_ids": (9,)}
    arrivals = {0: [(20, {}), (3, {}), (9, {})], 50: [(2, {})], 100: [(5, late)]}
    for turn in range(130):
        for length, given in arrivals.get(turn, ()):
            drawn = [rng.randrange(1, 4) for _ in range(length)]
            prompt = with_images(drawn) if grids else pack_tokens(drawn)
            sampling = Sampling(seed=turn, max_tokens=40, temperature=0.5, **given)
            state = reduce(state, RequestArrived(
                id=state.next_id, name="", prompt=prompt, sampling=sampling, priority=0, arrival_ns=0
            ))  # fmt: skip
        if turn == 20:
            state = reduce(state, RequestAborted(ids=(1,), reason="client"))
        while (plan := schedule(state)) is not None:
            state = reduce(state, plan)
            scheduled, before, newest = state.in_flight[-1], newest, batch.step_inputs(state)
            again += [turn] if before is newest else []
            assert_equal_steps(newest, rebuild(state, sampled, VOCABULARY))
            tokens = take_drawn(batch, scheduled, rng, sampled)
            pending_step.append((scheduled.step, tokens))
        if pending_step:
            step, tokens = pending_step.pop(0)
            state = reduce(state, StepCommitted(step=step, tokens=pack_tokens(tokens)))
    assert len([turn for turn in again if turn < 40]) > 15 and any(50 < turn < 100 for turn in again)
    assert not any(102 < turn < 114 for turn in again), "a row below its minimum length changes"
    assert len([turn for turn in again if turn > 114]) > 5, "neither a bias nor penalties, whose counts grow, nor log-probabilities do"


def test_tokens_of_a_step_that_is_not_the_newest_are_refused() -> None:
    config = SchedulerConfig(
        block_size=4, page_count=8, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=16, vocab_size=9
    )
    state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
    sampling = Sampling(seed=1, max_tokens=4)
    arrival = RequestArrived(id=0, name="", prompt=pack_tokens([1, 2]), sampling=sampling, priority=0, arrival_ns=0)
    state = reduce(state, arrival)
    state, batch = reduce(state, schedule(state)), PersistentBatch(config, 9)
    scheduled, tokens = state.in_flight[0], np.array([3])
    with pytest.raises(ValueError, match="tokens of step 0"):
        batch.take_sampled(scheduled, tokens)
    batch.step_inputs(state)
    batch.take_sampled(scheduled, tokens)
