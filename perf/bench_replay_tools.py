"""What the log tool's commands cost: shrink, to-test, trace, fork, what-if, and the judging of watch.

`python -m pytest perf/bench_replay_tools.py`. Logs are made by futures of an empty engine (vnext/replay/forking.py): real
scheduler, samples of chance; the thousand futures are of the long log of bench_replay.py. `extra_info` has the counts by
which a time is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest
from msgspec.structs import replace

from scripts.make_log import make_log
from vnext.replay.fork import Order, fork
from vnext.replay.forking import Wishes, future_of
from vnext.replay.index import Index
from vnext.replay.shrinking import shrink_log, write_log
from vnext.replay.source import open_log
from vnext.replay.step_times import fit, recorded
from vnext.replay.to_test import file_text
from vnext.replay.trace import trace
from vnext.replay.watch import Watcher
from vnext.replay.what_if import Objective, candidates, timed, what_if
from vnext.replay.what_if_run import rerun
from vnext.sched.sim.chance import Chance
from vnext.sched.sim.scenario import draw_clients, draw_config
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.log import SEGMENT_SUFFIX, Frame
from vnext.state.params import Sampling
from vnext.state.reduce import start
from vnext.state.stamps import MAGIC, STAMPS_SUFFIX, head, stamp

LONG_STEPS = 1_000_000
LONG = Path(__file__).resolve().parents[1] / "build" / f"replay-{LONG_STEPS}"
STEP_NS = 20_000_000
MINUTES_10_STEPS = 30_000
RARE_TOKENS = 30
FUTURES = 1_000
ONCE = dict(rounds=1, warmup_rounds=0)


def server(running_max: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=16, block_count=64 * running_max, batch_tokens_max=2048, running_max=running_max, model_len_max=4096,
        vocab_size=32_000,
    )  # fmt: skip


def started(config: SchedulerConfig) -> EngineStarted:
    return EngineStarted(config=config, model="bench", model_digest="", world_size=1, environment={}, started_ns=0)


@cache
def served(running_max: int, steps: int) -> tuple[AnyEvent, ...]:
    """A full batch: prompts of 512 tokens, answers of 200."""
    config = server(running_max)
    sampling = Sampling(seed=0, max_tokens=200, ignore_eos=True)
    arrivals = tuple(
        RequestArrived(id=0, name="", prompt=pack_tokens([n + 1] * 512), sampling=sampling, priority=0, arrival_ns=0)
        for n in range(50)
    )
    wishes = Wishes(
        steps=steps, arrivals=arrivals, arrivals_per_mille=running_max * 5, aborts_per_mille=2, resets_per_mille=0
    )
    return (started(config), *events_of(config, wishes, 1))


def events_of(config: SchedulerConfig, wishes: Wishes, seed: int) -> list[AnyEvent]:
    told: list[AnyEvent] = []
    future = future_of(start(started(config)), seed, wishes, lambda before, event, after: told.append(event))
    assert future.kind == ""
    return told


@cache
def small_life(steps: int) -> tuple[AnyEvent, ...]:
    """A tiny engine of which much is asked: requests give way all the time."""
    config = replace(draw_config(Chance(11)), block_count=16, block_size=2, running_max=6, chunked_prefill=True, model_len_max=24)
    clients = draw_clients(Chance(5), config, 200)
    arrivals = tuple(
        RequestArrived(id=0, name="", prompt=pack_tokens(c.prompt), sampling=c.sampling, priority=c.priority, arrival_ns=0)
        for c in clients
        if c.prompt
    )
    wishes = Wishes(steps=steps, arrivals=arrivals, arrivals_per_mille=400, aborts_per_mille=20, resets_per_mille=5)
    return (started(config), *events_of(config, wishes, 2))


def stamped(events: Sequence[AnyEvent], folder: Path) -> Path:
    path = write_log(events, folder)
    data, now_ns = bytearray(head.pack(MAGIC, 0, 0)), 0
    for item in open_log(folder).items():
        if isinstance(item, Frame):
            now_ns += STEP_NS * sum(isinstance(event, StepCommitted) for event in item.events)
            data += stamp.pack(item.first_event + len(item.events), now_ns)
    path.with_name(path.name.removesuffix(SEGMENT_SUFFIX) + STAMPS_SUFFIX).write_bytes(data)
    return folder


def once(benchmark, target: Callable[[], object]) -> object:
    return benchmark.pedantic(target, **ONCE)


def rare(before, event, after) -> bool:
    """Two requests give way in one step: it happens late in a log."""
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


@pytest.mark.parametrize("running_max", [8, 64, 256])
@pytest.mark.parametrize("brief", [False, True])
def test_trace(benchmark, tmp_path, running_max: int, brief: bool) -> None:
    write_log(served(running_max, {8: 16_000, 64: 4_000, 256: 2_000}[running_max]), tmp_path / "log")
    log = open_log(tmp_path / "log")
    with (tmp_path / "trace.json").open("w") as file:
        answer = once(benchmark, lambda: trace(log, file, "", not brief))
    seconds = benchmark.stats.stats.min
    benchmark.extra_info |= dict(
        trace_events=answer.trace_events, per_second=answer.trace_events / seconds, steps_per_second=answer.steps / seconds
    )


def test_fork(benchmark) -> None:
    """A thousand futures of 10,000 steps each, from the middle of a million steps, in two processes."""
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
    benchmark.extra_info |= dict(computed_seconds=computed_s, futures=FUTURES, steps=answer.steps, steps_per_second=answer.steps / benchmark.stats.stats.min)


def test_fork_tiny(benchmark, tmp_path) -> None:
    """A tiny cache, where requests give way all the time and no stride is long."""
    write_log(small_life(9_000)[:5_000], tmp_path / "log")
    order = Order(
        log=str(tmp_path / "log"), points=(200,), forks=20, steps=5_000, seed=0, aborts_per_mille=20, resets_per_mille=2,
        predicate="", share=0, shares=1,
    )  # fmt: skip
    answer, _ = once(benchmark, lambda: fork(order))
    benchmark.extra_info |= dict(steps=answer.steps, steps_per_second=answer.steps / benchmark.stats.stats.min)


@pytest.mark.parametrize("running_max", [8, 64])
def test_what_if(benchmark, tmp_path, running_max: int) -> None:
    log = open_log(stamped(served(running_max, 2_000), tmp_path / "log"))
    taken = recorded(log)
    model = fit(taken.features, taken.step_us)
    ran = once(benchmark, lambda: rerun(taken, log.header.started, server(running_max), timed(model, taken)))
    benchmark.extra_info |= dict(steps=ran.steps, steps_per_second=ran.steps / benchmark.stats.stats.min)


def test_what_if_sweep(benchmark, tmp_path) -> None:
    """A fifth of a hundred configurations of ten minutes, log read and model fitted, in two processes."""
    folder = stamped(served(8, MINUTES_10_STEPS), tmp_path / "log")
    sweep = candidates([], ["running_max=4,6,8,10,12", "batch_tokens_max=256,512,1024,2048"])
    answer = once(benchmark, lambda: what_if(folder, sweep, Objective(), jobs=2))
    assert len(answer.runs) == len(sweep) == 20 and answer.reproduced == answer.events
    benchmark.extra_info |= dict(steps=answer.recorded.steps, runs=len(sweep), seconds_for_100=5 * benchmark.stats.stats.min)


@pytest.mark.parametrize("running_max", [8, 64])
def test_watch(benchmark, tmp_path, running_max: int) -> None:
    write_log(served(running_max, 2_000), tmp_path / "log")
    log = open_log(tmp_path / "log")
    items = [item for item in log.items() if isinstance(item, Frame)]
    watcher = Watcher(log)
    once(benchmark, lambda: [watcher.take(item) for item in items])
    assert watcher.alarm is None
    benchmark.extra_info |= dict(steps=watcher.steps, steps_per_second=watcher.steps / benchmark.stats.stats.min)
