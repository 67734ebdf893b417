"""The transition: state', effects = fold(state, event). Every rank, the log tool and the simulator use this one function.

Pure and strict: an event that may not happen now raises IllegalEvent and changes nothing; arguments are never modified.
Aborting a request that has already ended is legal and has no effect.
"""

from __future__ import annotations

import msgspec

from vnext.state import pool as pools
from vnext.state.block_hash import root_hash
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    generated_by,
)
from vnext.state.facilities import tier
from vnext.state.facilities.table import FOLDS
from vnext.state.feasibility import refusal
from vnext.state.fold_commit import Effects, count_ended, finish, fold_step_committed
from vnext.state.fold_plan import fold_step_planned
from vnext.state.preempt import preempt
from vnext.state.recurrent import pages_held
from vnext.state.state import Counters, Request, State, Status, label_of, status_of
from vnext.state.store import extents
from vnext.state.store.clients import arrived, left_queue, no_clients
from vnext.state.store.rows import no_rows
from vnext.state.store.versions import VersionedMap
from vnext.state.waiting_queue import dequeue, enqueue, entry_of

replace = msgspec.structs.replace
ARENA_PLACES_MIN = 1 << 12
SLOT_COUNT_MAX = 1024
CLIENT_MAX = 2**63 - 1
GROUP_COUNT_MAX = 256  # one byte of a page's hash distinguishes the groups


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
        rows=no_rows(config.speculation is not None, config.state_pages > 0),
        waiting=(),
        waiting_hash=0,
        requests=VersionedMap(),
        tokens=extents.empty(ARENA_PLACES_MIN),
        tables=extents.empty(ARENA_PLACES_MIN),
        pool=pools.new_pool(config.page_count, None, config.state_pages),
        in_flight=(),
        counters=Counters(),
        token_digest=0,
        slots=(None,) * config.max_loras,
        clients=no_clients(config.policy),
    )


def _require_sane(config: SchedulerConfig) -> None:
    for field in ("block_size", "page_count", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "pipeline_depth"):
        require(getattr(config, field) >= 1, f"{field} is {getattr(config, field)}: it must be at least 1")
    require(
        config.long_prefill_token_threshold >= 0,
        f"long_prefill_token_threshold is {config.long_prefill_token_threshold}: it must be 0 or more",
    )
    require(0 <= config.max_loras <= SLOT_COUNT_MAX, f"max_loras is {config.max_loras}: it must be 0 to {SLOT_COUNT_MAX}")
    require(len(config.windows) <= GROUP_COUNT_MAX, f"{len(config.windows)} groups of layers: at most {GROUP_COUNT_MAX}")
    require(
        1 <= config.microbatches <= config.pipeline_depth,
        f"microbatches is {config.microbatches}: it must be 1 to {config.pipeline_depth}, the steps that may be in flight",
    )
    pinned = config.pinned_kv_fraction
    require(0 <= pinned < 1, f"pinned_kv_fraction is {pinned}: it must be at least 0 and below 1")
    require(min(config.windows, default=0) >= 0, f"windows is {config.windows}: each must be 0 or more")
    require(
        config.chunked_prefill or config.long_prefill_token_threshold == 0,
        "long_prefill_token_threshold needs chunked prefill",
    )
    require(config.inputs_a_step >= 0, f"inputs_a_step is {config.inputs_a_step}: it must be 0 or more")
    require(config.chunked_prefill or not config.inputs_a_step, "inputs_a_step needs chunked prefill")
    for field in ("input_units", "input_tokens"):
        bound = getattr(config, field)
        require(bound >= 0, f"{field} is {bound}: it must be 0 or more")
        require(config.inputs_a_step == 1 or not bound, f"{field} needs inputs_a_step 1")
    _require_states(config)


def _require_states(config: SchedulerConfig) -> None:
    """Require what goes with recurrent layers: one request that starts from a snapshot always has its pages."""
    pages, interval = config.state_pages, config.snapshot_interval
    require(pages >= 0 and interval >= 0, f"state_pages is {pages} and snapshot_interval {interval}: they must be 0 or more")
    if not pages:
        return
    require(interval % config.block_size == 0, f"snapshot_interval is {interval}: it must be a multiple of {config.block_size}")
    least = pages_held(config) + config.takes_snapshots
    require(pages >= least, f"state_pages is {pages}: one request may need {least}")
    for there, what in ((not config.chunked_prefill, "prompts in one piece"), (config.microbatches > 1, "microbatches")):
        require(not there, f"an engine with recurrent layers has no {what}")


def fold(state: State, event: AnyEvent) -> tuple[State, Effects]:
    """The state after one more event, and the event's effects. IllegalEvent if the event may not happen now."""
    effects: Effects = None
    match event:
        case StepPlanned():
            folded = fold_step_planned(state, event)
        case StepCommitted():
            folded, effects = fold_step_committed(state, event)
        case RequestArrived():
            folded = _fold_request_arrived(state, event)
        case RequestAborted():
            folded = _fold_request_aborted(state, event)
        case PrefixCacheReset():
            folded = replace(state, pool=pools.clear_prefix_index(state.pool), tier=tier.emptied(state.tier))
        case EngineRecovered():
            folded = _fold_engine_recovered(state, event)
        case EngineStarted():
            raise IllegalEvent("an engine starts once")
        case _:
            assert type(event) in FOLDS, f"{type(event).__name__} is no event"
            folded = FOLDS[type(event)](state, event)
    return replace(folded, sequence=state.sequence + 1), effects


def reduce(state: State, event: AnyEvent) -> State:
    """The state of `fold`, for callers that send no news to clients."""
    return fold(state, event)[0]


def _fold_request_arrived(state: State, event: RequestArrived) -> State:
    if event.id != state.next_id:
        raise IllegalEvent(f"request {event.id} arrived where {state.next_id} is due")
    if not 0 <= event.client <= CLIENT_MAX:
        raise IllegalEvent(f"request {event.id} has the client {event.client}: it must be 0 to {CLIENT_MAX}")
    config = state.config  # what it accepts does not depend on a shortage
    started = replace(config, max_num_batched_tokens=state.lowered_from) if state.lowered_from else config
    if (why_not := refusal(started, event)) is not None:
        raise IllegalEvent(f"request {event.id} should have been refused: {why_not}")
    request = Request(
        id=event.id,
        name=event.name,
        prompt=event.prompt,
        sampling=event.sampling,
        priority=event.priority,
        arrival_ns=event.arrival_ns,
        root=root_hash(event.cache_salt, config.block_size, event.sampling.adapter),
        client=event.client,
        weight=event.weight,
    )
    clients = arrived(state, request)
    state = enqueue(state, entry_of(config, label_of(state.weights), request, request.prompt + generated_by(event)))
    return replace(
        state, next_id=state.next_id + 1, requests=state.requests.with_items([(request.id, request)]), clients=clients
    )


def _fold_engine_recovered(state: State, event: EngineRecovered) -> State:
    """Steps in flight are over without tokens; their numbers are not used again."""
    require(not event.log or state.sequence == 1, "an engine that goes on behind another's log says so in its second event")
    require(min(event.frames, event.cautious) >= 0, f"{event.frames} frames, cautious below {event.cautious}: less than none")
    state = replace(state, in_flight=(), committed=state.planned)
    state = tier.without_transfers(preempt(state, tuple(range(len(state.rows)))))
    return replace(
        state,
        tokens=extents.empty(ARENA_PLACES_MIN),
        tables=extents.empty(ARENA_PLACES_MIN),
        pool=pools.new_pool(state.config.page_count, state.pool.pins, state.config.state_pages),
        slots=(None,) * state.config.max_loras,
        cautious=event.cautious,
        encoding=None,
        sought=None,
    )


def _fold_request_aborted(state: State, event: RequestAborted) -> State:
    statuses = {request_id: status_of(state, request_id) for request_id in event.ids}
    require(Status.UNKNOWN not in statuses.values(), "a request that is unknown cannot be aborted")
    queued = sorted(request_id for request_id, status in statuses.items() if status is Status.WAITING)
    if queued:
        state = dequeue(state, {place for place, entry in enumerate(state.waiting) if entry.id in queued})
        counters = count_ended(state, len(queued), "aborted")
        clients = left_queue(state, queued)
        state = replace(state, requests=state.requests.without(queued), counters=counters, clients=clients)
    running = {request_id for request_id, status in statuses.items() if status is Status.RUNNING}
    rows = [row for row, request_id in enumerate(state.rows.id.tolist()) if request_id in running]
    return finish(state, rows, "aborted") if rows else state
