"""The law: state' = reduce(state, event). One function, the same on every rank, in the log tool and in the simulator.

Pure and strict: an event that may not happen now raises IllegalEvent and leaves everything as it was; the argument is
never changed. Legally ignored: aborting a request that has ended.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from vnext.state import extents, pool as pools
from vnext.state.chain import chain_keys, root_key
from vnext.state.committing import Settled, count_ended, finish, fold_step_committed
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
)
from vnext.state.lifecycle import Change, Status, after
from vnext.state.order import dequeue, enqueue
from vnext.state.planning import fold_step_planned
from vnext.state.refusal import refusal
from vnext.state.rows import no_rows
from vnext.state.state import Counters, Request, State, Waiting, status_of
from vnext.state.versions import VersionedMap

replace = msgspec.structs.replace
ARENA_PLACES_MIN = 1 << 12
GROUP_COUNT_MAX = 256  # names of pages tell groups apart by one byte


def start(event: EngineStarted) -> State:
    """The state after the first event of a log. IllegalEvent if the configuration cannot work."""
    config = event.config
    _require_sane(config)
    return State(
        config=config,
        sequence=1,
        next_id=0,
        planned=0,
        committed=0,
        rows=no_rows(),
        waiting=(),
        waiting_sum=0,
        requests=VersionedMap(),
        tokens=extents.empty(ARENA_PLACES_MIN),
        tables=extents.empty(ARENA_PLACES_MIN),
        pool=pools.new_pool(config.block_count),
        flights=(),
        counters=Counters(),
        token_digest=0,
    )


def _require_sane(config: SchedulerConfig) -> None:
    for field in ("block_size", "block_count", "batch_tokens_max", "running_max", "model_len_max", "pipeline_depth"):
        require(getattr(config, field) >= 1, f"{field} is {getattr(config, field)}: it must be at least 1")
    require(config.prefill_threshold >= 0, f"prefill_threshold is {config.prefill_threshold}: it must be 0 or more")
    require(len(config.windows) <= GROUP_COUNT_MAX, f"{len(config.windows)} groups of layers: at most {GROUP_COUNT_MAX}")
    require(min(config.windows, default=0) >= 0, f"windows is {config.windows}: each must be 0 or more")
    require(config.chunked_prefill or config.prefill_threshold == 0, "prefill_threshold needs chunked prefill")


def reduce(state: State, event: AnyEvent, settled: Settled | None = None) -> State:
    """The state after one more event. IllegalEvent if it may not happen now.

    `settled`: what `settle(state, event)` gave for a StepCommitted, for a caller that needs it too and asked before.
    """
    return replace(_fold(state, event, settled), sequence=state.sequence + 1)


def _fold(state: State, event: AnyEvent, settled: Settled | None) -> State:
    match event:
        case StepPlanned():
            return fold_step_planned(state, event)
        case StepCommitted():
            return fold_step_committed(state, event, settled)
        case RequestArrived():
            return _fold_request_arrived(state, event)
        case RequestAborted():
            return _fold_request_aborted(state, event)
        case PrefixCacheReset():
            return replace(state, pool=pools.forget_all(state.pool))
        case EngineStarted():
            raise IllegalEvent("an engine starts once")
        case _:
            assert_never(event)


def _fold_request_arrived(state: State, event: RequestArrived) -> State:
    require(event.id == state.next_id, f"request {event.id} arrived where {state.next_id} is due")
    why_not = refusal(state.config, event)
    require(why_not is None, f"request {event.id} should have been refused: {why_not}")
    after(Status.UNKNOWN, Change.ARRIVE)
    request = Request(
        id=event.id,
        name=event.name,
        prompt=event.prompt,
        sampling=event.sampling,
        priority=event.priority,
        arrival_ns=event.arrival_ns,
        root=root_key(event.cache_salt),
    )
    state = enqueue(state, _first_wait(state.config, request))
    return replace(
        state, next_id=state.next_id + 1, requests=state.requests.with_items([(request.id, request)])
    )


def _first_wait(config: SchedulerConfig, request: Request) -> Waiting:
    keys = chain_keys(request.root, request.prompt, config.block_size) if config.prefix_caching else ()
    return Waiting(id=request.id, priority=request.priority, tokens=request.prompt, keys=keys, epoch=0)


def _fold_request_aborted(state: State, event: RequestAborted) -> State:
    statuses = {request_id: status_of(state, request_id) for request_id in event.ids}
    for status in statuses.values():
        after(status, Change.ABORT)
    queued = sorted(request_id for request_id, status in statuses.items() if status is Status.WAITING)
    if queued:
        state = dequeue(state, {place for place, entry in enumerate(state.waiting) if entry.id in queued})
        counters = count_ended(state, len(queued), Change.ABORT)
        state = replace(state, requests=state.requests.without(queued), counters=counters)
    running = {request_id for request_id, status in statuses.items() if status is Status.RUNNING}
    rows = [row for row, request_id in enumerate(state.rows.id.tolist()) if request_id in running]
    return finish(state, rows, Change.ABORT) if rows else state
