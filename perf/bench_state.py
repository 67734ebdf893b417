"""Benchmark of the state machine: a steady decode step, an arrival, a block, and the plan's event as bytes.

`python -m pytest perf/bench_state.py`. Runs only the reducer and the scheduler, without model, process or channel, as the
engine core does in asynchronous mode (plan t+1, then commit t). Prompts have 512 to 527 tokens, so at block size 16 one row in
sixteen completes a block each step and takes a new one. The prefix cache is on.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from vnext.commands.bench.control.steady import BLOCK_SIZE, VOCABULARY, advance, committed, steady_decode
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.pool import new_pool, release, take
from vnext.state.reduce import reduce, start
from vnext.state.state import State

ROUNDS, WARMUP = 400, 32
RUNNING = (32, 256, 1024)
LENGTHS = (1_000, 1_000_000)

running = pytest.mark.parametrize("request_count", RUNNING)


@running
def test_step(benchmark, request_count: int) -> None:
    """schedule + reduce(StepPlanned) + reduce(StepCommitted), the cheap laws after each."""
    state = steady_decode(request_count)

    def step() -> None:
        nonlocal state
        state = advance(state)

    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert len(state.rows) == request_count, "the benchmark left its steady state"


@pytest.mark.parametrize("prompt_length", LENGTHS)
def test_step_of_one_request(benchmark, prompt_length: int) -> None:
    """The same with one request, by its length."""
    state = steady_decode(1, prompt_length)

    def step() -> None:
        nonlocal state
        state = advance(state)

    benchmark.pedantic(step, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert int(state.rows.computed[0]) > prompt_length + WARMUP, "the benchmark left its steady state"


@running
def test_schedule(benchmark, request_count: int) -> None:
    """The decision alone."""
    state = steady_decode(request_count)
    plan = benchmark(schedule, state)
    assert plan == StepPlanned(step=state.planned), "a steady step is the expected one"


@running
def test_digest(benchmark, request_count: int) -> None:
    """The digest that a rank computes every `digest_interval` steps."""
    benchmark(digest, steady_decode(request_count))


@running
def test_plan_encode(benchmark, request_count: int) -> None:
    """The plan's event as bytes; a steady plan's size does not depend on the batch."""
    plan = schedule(steady_decode(request_count))
    data = benchmark(msgspec.msgpack.Encoder().encode, plan)
    benchmark.extra_info["plan_bytes"] = len(data)


@running
def test_plan_decode(benchmark, request_count: int) -> None:
    """The same bytes decoded as the union of all events, as a rank does."""
    plan = schedule(steady_decode(request_count))
    data = msgspec.msgpack.encode(plan)
    assert benchmark(msgspec.msgpack.Decoder(AnyEvent).decode, data) == plan


def test_loop(benchmark) -> None:
    """1,000 turns of an empty loop: shows whether two records come from equally fast machines."""

    def loop() -> None:
        for _ in range(1000):
            pass

    benchmark(loop)


# ---- arrivals and blocks -----------------------------------------------------------------------------------------

LONG_PROMPT = 4096


class LongPrompts:
    """An engine that serves prompts of 4,096 tokens, each after the previous one has ended."""

    def __init__(self, shared: bool) -> None:
        """`shared`: all prompts are equal, so the cache has them from the second arrival on."""
        config = SchedulerConfig(
            block_size=BLOCK_SIZE, page_count=20_000, max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192,
            vocab_size=VOCABULARY,
        )  # fmt: skip
        self.state = start(
            EngineStarted(config=config, model="none", model_digest="", world_size=1, environment={}, started_ns=0)
        )
        self._rng, self._shared = np.random.default_rng(1), shared
        self._prompt = self._fresh()

    def _fresh(self) -> bytes:
        return pack_tokens(self._rng.integers(3, VOCABULARY, LONG_PROMPT))

    def next_arrival(self) -> RequestArrived:
        """Return the next arrival, in an otherwise idle engine."""
        while self.state.requests:
            self._step()
        index, prompt = self.state.next_id, self._prompt if self._shared else self._fresh()
        sampling = Sampling(seed=index, max_tokens=2, ignore_eos=True)
        return RequestArrived(
            id=RequestId(index), name=str(index), prompt=prompt, sampling=sampling, priority=0, arrival_ns=0
        )

    def arrive(self) -> None:
        event = self.next_arrival()
        self.state = reduce(self.state, event)

    def _step(self) -> None:
        plan = schedule(self.state)
        if plan is not None:
            self.state = reduce(self.state, plan)
        self.state = reduce(self.state, committed(self.state))


shared = pytest.mark.parametrize("shared", (False, True), ids=("miss", "hit"))


def test_arrival(benchmark) -> None:
    """A prompt of 4,096 tokens arrives: its blocks are hashed and it is queued."""
    engine = LongPrompts(shared=False)

    def arrival() -> tuple:
        event = engine.next_arrival()
        return (engine.state, event), {}

    def fold(state: State, event: RequestArrived) -> None:
        engine.state = reduce(state, event)

    benchmark.pedantic(fold, setup=arrival, rounds=100, warmup_rounds=5)
    assert len(engine.state.waiting) == 1


@shared
def test_first_schedule(benchmark, shared: bool) -> None:
    """The decision to admit it, with and without its first 4,080 tokens in the cache."""
    engine = LongPrompts(shared)
    engine.arrive()

    def arrived() -> tuple:
        engine.arrive()
        return (engine.state,), {}

    plan = benchmark.pedantic(schedule, setup=arrived, rounds=100, warmup_rounds=5)
    assert plan.admitted == ((0, BLOCK_SIZE if shared else LONG_PROMPT),)


@shared
def test_first_fold(benchmark, shared: bool) -> None:
    """Fold that plan: take (or share) 256 blocks, hash them, enter them in the table, write the history."""
    engine = LongPrompts(shared)
    engine.arrive()

    def fold(state: State, plan: StepPlanned) -> None:
        engine.state = reduce(state, plan)

    def planned() -> tuple:
        engine.arrive()
        return (engine.state, schedule(engine.state)), {}

    benchmark.pedantic(fold, setup=planned, rounds=100, warmup_rounds=5)
    assert len(engine.state.rows) == 1


blocks = pytest.mark.parametrize("page_count", (1, 32, 256))


@blocks
def test_take_blocks(benchmark, page_count: int) -> None:
    """Allocate `page_count` blocks at once and free them; `ns_per_block` covers both."""
    pool = new_pool(20_000)

    def turn() -> None:
        nonlocal pool
        pool, taken = take(pool, page_count)
        pool = release(pool, taken)

    benchmark(turn)
    benchmark.extra_info["ns_per_block"] = round(benchmark.stats.stats.median * 1e9 / page_count, 1)


def test_import_of_the_scheduler(benchmark) -> None:
    """Start a process that imports vnext.sched and exits; `peak_mb` is its peak memory."""
    code = "import {}; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"

    def process(module: str) -> float:
        ran = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, check=True, text=True)
        return int(ran.stdout) / 1024

    peak_mb = benchmark.pedantic(process, ("vnext.sched.schedule",), rounds=10, warmup_rounds=1)
    benchmark.extra_info["peak_mb"] = round(peak_mb, 1)
