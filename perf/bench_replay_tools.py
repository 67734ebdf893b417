"""Benchmark of vnext-replay's commands: shrink, to-test, trace, fork, what-if, and the checks of watch.

`python -m pytest perf/bench_replay_tools.py`. The logs are futures of an empty engine (vnext/replay/futures/forking.py): the real
scheduler with random samples. The thousand futures branch off the long log of bench_replay.py. `extra_info` has the counts
that the times are divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest
from msgspec.structs import replace

from scripts.make_log import make_log
from tests.sim.scenario_draw import draw_clients, draw_config
from vnext.log.codec import SEGMENT_SUFFIX, Frame
from vnext.log.timestamps import MAGIC, TIMESTAMPS_SUFFIX, head, stamp
from vnext.replay.answers.trace import trace
from vnext.replay.answers.watch import Watcher
from vnext.replay.futures.fork import Order, fork
from vnext.replay.futures.forking import FutureOptions, future_of
from vnext.replay.futures.ground import ground_of, timed
from vnext.replay.futures.shrinking import shrink_log, write_log
from vnext.replay.futures.to_test import file_text
from vnext.replay.futures.what_if import DRAWN_MAX, DRAWS, Objective, candidates, what_if
from vnext.replay.futures.what_if_run import rerun
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.sim.rng import Rng
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import start

LONG_STEPS = 1_000_000
LONG = Path(__file__).resolve().parents[1] / "build" / f"replay-{LONG_STEPS}"
STEP_NS = 20_000_000
MINUTES_10_STEPS = 30_000
RARE_TOKENS = 30
FUTURES = 1_000
TINY_STEPS = 5_000
TRACED = {8: 16_000, 64: 4_000, 256: 2_000}
ONCE = dict(rounds=1, warmup_rounds=0)


def server(max_num_seqs: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=16,
        page_count=64 * max_num_seqs,
        max_num_batched_tokens=2048,
        max_num_seqs=max_num_seqs,
        max_model_len=4096,
        vocab_size=32_000,
    )


def started(config: SchedulerConfig) -> EngineStarted:
    return EngineStarted(config=config, model="bench", model_digest="", world_size=1, environment={}, started_ns=0)


@cache
def served(max_num_seqs: int, steps: int) -> tuple[AnyEvent, ...]:
    """Return the events of a full batch: prompts of 512 tokens, answers of 200."""
    config = server(max_num_seqs)
    sampling = Sampling(seed=0, max_tokens=200, ignore_eos=True)
    arrivals = tuple(
        RequestArrived(id=0, name="", prompt=pack_tokens([n + 1] * 512), sampling=sampling, priority=0, arrival_ns=0)
        for n in range(50)
    )
    options = FutureOptions(
        steps=steps, arrivals=arrivals, arrivals_per_mille=max_num_seqs * 5, aborts_per_mille=2, resets_per_mille=0
    )
    return (started(config), *events_of(config, options, 1))


def events_of(config: SchedulerConfig, options: FutureOptions, seed: int) -> list[AnyEvent]:
    reported: list[AnyEvent] = []
    future = future_of(start(started(config)), seed, options, lambda before, event, after: reported.append(event))
    assert future.kind == ""
    return reported


@cache
def small_life(steps: int) -> tuple[AnyEvent, ...]:
    """Return the events of a tiny, overloaded engine that preempts all the time."""
    config = replace(
        draw_config(Rng(11)), page_count=16, block_size=2, max_num_seqs=6, chunked_prefill=True, max_model_len=24
    )
    clients = draw_clients(Rng(5), config, 200)
    arrivals = tuple(
        RequestArrived(id=0, name="", prompt=pack_tokens(c.prompt), sampling=c.sampling, priority=c.priority, arrival_ns=0)
        for c in clients
        if c.prompt
    )
    options = FutureOptions(steps=steps, arrivals=arrivals, arrivals_per_mille=400, aborts_per_mille=20, resets_per_mille=5)
    return (started(config), *events_of(config, options, 2))


def timestamped(events: Sequence[AnyEvent], folder: Path) -> Path:
    path = write_log(events, folder)
    data, now_ns = bytearray(head.pack(MAGIC, 0, 0)), 0
    for item in open_log(folder).items():
        if isinstance(item, Frame):
            now_ns += STEP_NS * sum(isinstance(event, StepCommitted) for event in item.events)
            data += stamp.pack(item.first_event + len(item.events), now_ns)
    path.with_name(path.name.removesuffix(SEGMENT_SUFFIX) + TIMESTAMPS_SUFFIX).write_bytes(data)
    return folder


def once(benchmark, target: Callable[[], object]) -> object:
    return benchmark.pedantic(target, **ONCE)


def rare(before, event, after) -> bool:
    """True if one step preempts two requests, which happens late in a log."""
    return after.counters.preempted - before.counters.preempted >= 2 and after.sequence > RARE_TOKENS


def test_shrink(benchmark, tmp_path) -> None:
    events = small_life(9_000)
    last = max(n for n in range(len(events)) if type(events[n]).__name__ == "StepPlanned" and len(events[n].preempted) >= 2)
    write_log(events[: last + 1], tmp_path / "log")
    log = open_log(tmp_path / "log")
    answer, small = once(benchmark, lambda: shrink_log(log, predicate=rare))
    benchmark.extra_info |= dict(events_before=answer.events_before, log_events=last, events=len(small))
    assert 0 < len(small) <= 40


def test_to_test(benchmark, tmp_path) -> None:
    events = small_life(9_000)[:400]
    text, _ = once(benchmark, lambda: file_text(events))
    benchmark.extra_info |= dict(events=len(events), letters=len(text))


@pytest.mark.parametrize("max_num_seqs", [8, 64, 256])
@pytest.mark.parametrize("brief", [False, True])
def test_trace(benchmark, tmp_path, max_num_seqs: int, brief: bool) -> None:
    write_log(served(max_num_seqs, TRACED[max_num_seqs]), tmp_path / "log")
    log = open_log(tmp_path / "log")
    with (tmp_path / "trace.json").open("w") as file:
        answer = once(benchmark, lambda: trace(log, file, "", not brief))
    seconds = benchmark.stats.stats.min
    benchmark.extra_info |= dict(
        trace_events=answer.trace_events, per_second=answer.trace_events / seconds, steps_per_second=answer.steps / seconds
    )


def test_fork(benchmark) -> None:
    """A thousand futures of 10,000 steps each, from the middle of the long log, in two processes."""
    if not any(LONG.glob("*.vnextlog")):
        make_log(LONG, LONG_STEPS, 8)
    assert all(segment.directory.entries for segment in Index(open_log(LONG)).segments), "the index is made before"
    order = Order(
        log=str(LONG), points=(LONG_STEPS // 2,), forks=FUTURES, steps=10_000, seed=0, aborts_per_mille=20, resets_per_mille=2,
        predicate="", share=0, shares=1,
    )  # fmt: skip
    before = getrusage(RUSAGE_CHILDREN)
    answer, _ = once(benchmark, lambda: fork(order, jobs=2))
    assert answer.failed == 0 and answer.steps == FUTURES * 10_000
    after = getrusage(RUSAGE_CHILDREN)
    computed_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    benchmark.extra_info |= dict(
        computed_seconds=computed_s,
        futures=FUTURES,
        steps=answer.steps,
        steps_per_second=answer.steps / benchmark.stats.stats.min,
    )


def test_fork_tiny(benchmark, tmp_path) -> None:
    """A tiny cache with constant preemptions, where every fast-forward is short."""
    write_log(small_life(9_000)[:5_000], tmp_path / "log")
    order = Order(
        log=str(tmp_path / "log"), points=(200,), forks=20, steps=TINY_STEPS, seed=0, aborts_per_mille=20, resets_per_mille=2,
        predicate="", share=0, shares=1,
    )
    answer, _ = once(benchmark, lambda: fork(order))
    benchmark.extra_info |= dict(steps=answer.steps, steps_per_second=answer.steps / benchmark.stats.stats.min)


@pytest.mark.parametrize("max_num_seqs", [8, 64])
def test_what_if(benchmark, tmp_path, max_num_seqs: int) -> None:
    log = open_log(timestamped(served(max_num_seqs, 2_000), tmp_path / "log"))
    ground = ground_of(log)
    clock = timed(ground.model, ground.taken, ground.pace)
    ran = once(benchmark, lambda: rerun(ground.taken, ground.started, server(max_num_seqs), clock))
    benchmark.extra_info |= dict(steps=ran.steps, steps_per_second=ran.steps / benchmark.stats.stats.min)


def test_what_if_sweep(benchmark, tmp_path) -> None:
    """20 of 100 configurations over a log of ten minutes, with reading and model fitting, in two processes."""
    folder = timestamped(served(8, MINUTES_10_STEPS), tmp_path / "log")
    sweep = candidates([], ["max_num_seqs=4,6,8,10,12", "max_num_batched_tokens=256,512,1024,2048"])
    answer = once(benchmark, lambda: what_if(folder, sweep, Objective(), jobs=2))
    assert len(answer.runs) == len(sweep) == 20 and answer.reproduced == answer.events
    drawn = DRAWS * (DRAWN_MAX + 1)
    seconds = benchmark.stats.stats.min / (1 + len(sweep) + drawn) * (101 + drawn)
    benchmark.extra_info |= dict(steps=answer.recorded.steps, runs=len(sweep), seconds_for_100=seconds)


@pytest.mark.parametrize("max_num_seqs", [8, 64])
def test_watch(benchmark, tmp_path, max_num_seqs: int) -> None:
    write_log(served(max_num_seqs, 2_000), tmp_path / "log")
    log = open_log(tmp_path / "log")
    items = [item for item in log.items() if isinstance(item, Frame)]
    watcher = Watcher(log)
    once(benchmark, lambda: [watcher.take(item) for item in items])
    assert watcher.alarm is None
    benchmark.extra_info |= dict(steps=watcher.steps, steps_per_second=watcher.steps / benchmark.stats.stats.min)
