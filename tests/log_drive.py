"""A whole engine in memory for log tests: real reducer and scheduler, tokens from a hash instead of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from vnext.log.codec import RankDigest
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    WeightsChanged,
    pack_tokens,
)
from vnext.state.facilities.weights import is_drained
from vnext.state.feasibility import refusal
from vnext.state.params import Sampling
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State

Iteration = tuple[list[AnyEvent], list[State], State, list[RankDigest]]


def small_config(**changes) -> SchedulerConfig:
    """A small pool and a tiny vocabulary: sharing, preemption and stops happen every few steps."""
    fields = dict(
        block_size=4, page_count=24, max_num_batched_tokens=20, max_num_seqs=6, max_model_len=60, eos_token_ids=(0,),
        vocab_size=6, digest_interval=3,
    )  # fmt: skip
    return SchedulerConfig(**(fields | changes))


def drawn_config(rng: random.Random) -> SchedulerConfig:
    """Any depth, policy and block size of 1 to 4 tokens, with a pool of little more than one request's blocks."""
    size = rng.randint(1, 4)
    windows = rng.choice([(), (), (3,), (0, 5), (7, 0, 2)])
    config = small_config(
        block_size=size, page_count=-(-59 // size) + rng.randint(0, 12), pipeline_depth=rng.randint(1, 3),
        policy=rng.choice(("fcfs", "priority")), eos_token_ids=rng.choice(((0,), (0, 2), ())),
        max_num_seqs=rng.randint(3, 8), max_num_batched_tokens=rng.choice((7, 20, 64)),
        long_prefill_token_threshold=rng.choice((0, 0, 5)),
    )  # fmt: skip
    return msgspec.structs.replace(config, windows=windows, page_count=config.page_count * max(len(windows), 1))


def started(config: SchedulerConfig, world_size: int = 2) -> EngineStarted:
    return EngineStarted(
        config=config, model="toy", model_digest="", world_size=world_size, environment={}, started_ns=0
    )


def engine(
    config: SchedulerConfig, seed: int, arrivals: int, world_size: int = 2, recovering: float = 0.0, resumed: int = 0,
    changing: float = 0.0,
) -> Iterator[Iteration]:  # fmt: skip
    """Iterations until every request has ended: events, the state before each, the state after all, rank digests. In a share
    `recovering` of them the ranks are replaced; with `resumed` it continues another engine with so many requests; in a share `changing` it pauses for other weights."""
    rng, state, histories = random.Random(seed), start(started(config)), [[1] * 9]
    reports: list[RankDigest] = []
    while arrivals or state.requests or state.in_flight:
        events: list[AnyEvent] = []
        befores: list[State] = []
        chosen = _taken_over(rng, state, histories, resumed) if resumed else _chosen(rng, state, histories, arrivals, recovering, changing)
        resumed = 0
        for event in chosen:
            befores.append(state)
            events.append(event)
            arrivals -= type(event) is RequestArrived
            state = reduce(state, event)
            if isinstance(event, EngineRecovered):
                reports = []
            if isinstance(event, StepPlanned) and event.step % config.digest_interval == 0:
                reports += [RankDigest(rank, event.step, digest(state)) for rank in range(world_size)]
        due = [report for report in reports if report.step < state.committed]
        reports = [report for report in reports if report.step >= state.committed]
        yield events, befores, state, due


def _taken_over(rng: random.Random, state: State, histories: list[list[int]], count: int) -> Iterator[AnyEvent]:
    """The first iteration of an engine that goes on behind another one's log: up to `count` requests with their tokens so far."""
    yield EngineRecovered(cause="the engine core was killed (signal 9)", log="/logs/before", frames=77, cautious=count // 2)
    for id_ in range(count):
        arrival, tokens = msgspec.structs.replace(_arrival(rng, state, histories), id=id_, name=f"secret name {id_}"), b""
        fields = {name: getattr(arrival, name) for name in arrival.__struct_fields__}
        for _ in range(rng.randint(0, 6)):
            more = tokens + pack_tokens([xxhash.xxh3_64_intdigest(arrival.prompt + tokens) % 6])
            if refusal(state.config, RequestResumed(**fields | {"generated": more})):
                break
            tokens = more
        yield RequestResumed(**fields | {"generated": tokens})


def _chosen(
    rng: random.Random, state: State, histories: list[list[int]], arrivals: int, recovering: float, changing: float
) -> Iterator[AnyEvent]:
    """One iteration's events, each chosen in the state that the ones before it left."""
    if recovering and rng.random() < recovering:
        event = EngineRecovered(cause="rank 1 was killed (signal 9)", cautious=rng.choice((0, state.next_id)))
        yield event
        return  # new ranks start meanwhile
    for event in _changed(rng, state, changing):
        yield event
        state = reduce(state, event)
    if arrivals and rng.random() < 0.5:
        event = _arrival(rng, state, histories)
        yield event
        state = reduce(state, event)
    if state.next_id and rng.random() < 0.05:
        event = RequestAborted(ids=(rng.randrange(state.next_id),), reason="client")
        yield event
        state = reduce(state, event)
    if rng.random() < 0.02:
        yield PrefixCacheReset()
        state = reduce(state, PrefixCacheReset())
    if len(state.in_flight) == state.config.pipeline_depth or (state.in_flight and schedule(state) is None):
        event = StepCommitted(step=state.committed, tokens=_sampled(state, histories))
        yield event
        state = reduce(state, event)
    plan = schedule(state) if len(state.in_flight) < state.config.pipeline_depth else None
    if plan is not None:
        yield plan


def _changed(rng: random.Random, state: State, changing: float) -> tuple[AnyEvent, ...]:
    """The pause for other weights, or, once it is due, their change."""
    if state.paused and is_drained(state):
        version = state.weights.version if state.weights else 0
        asleep = (EnginePaused(mode="sleep"),) if rng.random() < 0.3 else ()
        change = WeightsChanged(version=version + 1, digest=f"digest {version + 1}", path="/secret/path")
        return *asleep, change, EnginePaused(mode="")
    if state.paused or not changing or rng.random() > changing:
        return ()
    return (EnginePaused(mode=rng.choice(("wait", "keep"))),)


def _arrival(rng: random.Random, state: State, histories: list[list[int]]) -> RequestArrived:
    """Often a prompt that continues an earlier conversation, end tokens included, so that prefixes are shared."""
    history = rng.choice(histories)
    prompt = history[: rng.randint(1, len(history))] + [rng.randrange(6) for _ in range(rng.randint(0, 9))]
    sampling = Sampling(
        seed=rng.getrandbits(64), max_tokens=rng.randint(1, 20), min_tokens=rng.choice((0, 0, 3)),
        stop_token_ids=rng.choice(((), (3,), (0, 3))), ignore_eos=rng.random() < 0.3, logit_bias=((4, 1.5),),
    )  # fmt: skip
    return RequestArrived(
        id=state.next_id, name=f"secret name {state.next_id}", prompt=pack_tokens(prompt[-40:]), sampling=sampling,
        priority=rng.randint(0, 2), arrival_ns=state.sequence, cache_salt=rng.choice(("", "", "secret salt")),
        client=state.next_id % 3,
    )  # fmt: skip


def _sampled(state: State, histories: list[list[int]]) -> bytes:
    """A token is a hash of its request's history, so a preempted request samples the same again."""
    scheduled, tokens = state.in_flight[0], []
    for request_id in scheduled.ids[scheduled.samples].tolist():
        found = (state.rows.id == request_id).nonzero()[0]
        history = row_tokens(state, int(found[0])) if len(found) else pack_tokens([])
        tokens.append(xxhash.xxh3_64_intdigest(bytes(history)) % 6)
        if len(found):
            histories.append([*history.tolist(), tokens[-1]])
    del histories[:-20]
    return pack_tokens(tokens)


def as_it_is(events, state_digest, ranks):
    return events, state_digest, ranks


def record(
    log_dir: Path,
    privacy="full",
    config=None,
    seed=1,
    arrivals=40,
    change=as_it_is,
    size=10**6,
    max_bytes=0,
    timestamped=False,
    **more,
) -> Path:
    """A recorded engine (`more` goes to it). `change` may rewrite (events, digest, ranks) of a frame before it is written."""
    config = config or small_config()
    bounds = Bounds(segment_bytes=size, max_bytes=max_bytes, timestamped=timestamped)
    recorder = Recorder.open(log_dir, started(config), privacy, bounds)
    for events, befores, after, ranks in engine(config, seed, arrivals, **more):
        for step in [event.step for event in events if timestamped and isinstance(event, StepCommitted)]:
            recorder.took(step, 1e-6 * (1 + step % 5))
        events, state_digest, ranks = change(events, digest(after), ranks)
        recorder.append(events, befores, state_digest, ranks)
    recorder.close()
    return log_dir
