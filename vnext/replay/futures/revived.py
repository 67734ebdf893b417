"""Revives the requests alive where a log without its beginning starts, as new arrivals.

Owns the replacement for the lost events. A request that was being answered arrives with all its tokens except the last
as its prompt, and that last token is its first answer. A request in the queue arrives with all its tokens. Both ask for
the rest of their answers. A snapshot has only the root key of a cache salt, so the salt is named by that key, for later
requests too. Lost are the positions of blocks, what the cache kept of requests that had ended, and the progress of
prompts without a sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from vnext.replay.futures.loads import resident
from vnext.sched.schedule import schedule
from vnext.state.block_hash import root_hash
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, RequestId, StepCommitted
from vnext.state.feasibility import refusal
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import Request, State


class Revived(msgspec.Struct, frozen=True):
    """A request that arrives again under its old number. Its prompt includes `before` tokens of its answer; `last`
    (int32 bytes) is the token after them, empty for a request that waits or had no reported token."""

    arrival: RequestArrived
    before: int
    last: bytes


def revived(state: State) -> list[Revived]:
    """The requests of a state: rows in order, then the queue."""
    rows = [(id_, row_tokens(state, row).tobytes(), True) for row, id_ in enumerate(state.rows.id.tolist())]
    queue = [(entry.id, entry.tokens, False) for entry in state.waiting]
    return [_revived(state, state.requests[id_], tokens, runs) for id_, tokens, runs in (*rows, *queue)]


def _revived(state: State, request: Request, tokens: bytes, runs: bool) -> Revived:
    reported = len(tokens) // 4 - request.prompt_length
    cut = len(tokens) - 4 if runs and reported else len(tokens)
    before, sampling = cut // 4 - request.prompt_length, request.sampling
    left = replace(
        sampling, max_tokens=sampling.max_tokens - before, min_tokens=max(sampling.min_tokens - before, 0), constraint=None
    )  # the answer's tokens are known
    arrival = RequestArrived(
        id=request.id, name=request.name, prompt=tokens[:cut], sampling=left, priority=request.priority,
        arrival_ns=request.arrival_ns, cache_salt=_salt_of(request.root, state.config, sampling.adapter),
        client=request.client, weight=request.weight,
    )  # fmt: skip
    return Revived(arrival, before, tokens[cut:])


def salted(arrival: RequestArrived, config: SchedulerConfig) -> RequestArrived:
    """A request of the log whose salt is named by its root key, as for revived requests."""
    adapter = arrival.sampling.adapter
    root = root_hash(arrival.cache_salt, config.block_size, adapter)
    return replace(arrival, cache_salt=_salt_of(root, config, adapter))


def _salt_of(root: bytes, config: SchedulerConfig, adapter: str) -> str:
    return "" if root == root_hash("", config.block_size, adapter) else root.hex()


def warmed(started: EngineStarted, first: State, lives: Sequence[Revived]) -> tuple[State, dict[int, RequestId]]:
    """An engine in which `lives`, the requests of state `first`, continue, and their new numbers by their old ones; rejected
    requests have none. It begins with the adapters of `first`, as many as there are slots for.

    Their tokens are computed in one step of any size, as far as there is room; requests without room wait.
    """
    config = started.config
    tokens = sum(len(life.arrival.prompt) // 4 for life in lives)
    wide = replace(
        config, max_num_batched_tokens=max(config.max_num_batched_tokens, tokens), long_prefill_token_threshold=0
    )
    state, ids = start(replace(started, config=wide)), dict[int, RequestId]()
    for load in resident(first, config.max_loras):
        state = reduce(state, load)
    for life in (life for life in lives if life.last):
        state = _arrived(state, life, ids, config)
    plan = schedule(state)
    if plan is not None:
        state = reduce(state, plan)
        scheduled, lasts = state.in_flight[0], {ids[life.arrival.id]: life.last for life in lives if life.arrival.id in ids}
        sampled = b"".join(lasts[id_] for id_ in scheduled.ids[scheduled.samples].tolist())
        state = reduce(state, StepCommitted(step=scheduled.step, tokens=sampled))
    state = replace(state, config=config)
    for life in (life for life in lives if not life.last):
        state = _arrived(state, life, ids, config)
    return state, ids


def _arrived(state: State, life: Revived, ids: dict[int, RequestId], config: SchedulerConfig) -> State:
    """The state after an arrival, whose number is added to `ids`; the same state if the request is rejected."""
    arrival = replace(life.arrival, id=state.next_id)
    if refusal(config, arrival) is not None:
        return state
    ids[life.arrival.id] = arrival.id
    return reduce(state, arrival)
