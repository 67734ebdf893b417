"""Shortage: a step that no rank could compute for lack of memory, and the tokens that steps may take from then on.

The steps in flight are over without tokens. Everybody waits again with the tokens that are known, and hits what the cache has: a
page keeps its name unless a step that is over was to write it. The limit is the configuration's own, lowered, so that all decisions
follow it; `lowered_from` remembers what it was. By how much it is lowered, and when it is raised, is decided elsewhere
(vnext/sched/shortage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken, require
from vnext.state.events import AnyEvent, MemoryRanShort, StepLimitRaised
from vnext.state.preempt import preempt
from vnext.state.state import State
from vnext.state.windows import row_table

replace = msgspec.structs.replace


def halved(state: State) -> int:
    """The most tokens of a step behind a shortage: half of those of the oldest step in flight, at least one. What computes whole
    prompts cannot do with less than it has."""
    limit = state.config.max_num_batched_tokens
    return max(min(state.in_flight[0].tokens // 2, limit), 1) if state.config.chunked_prefill else limit


def started_config(state: State) -> SchedulerConfig:
    """The configuration with the limit that the engine started with: what it accepts does not depend on a shortage."""
    return replace(state.config, max_num_batched_tokens=state.lowered_from) if state.lowered_from else state.config


def lowered(config: SchedulerConfig, limits: tuple[int, int] | None) -> SchedulerConfig:
    """The configuration with the first of a snapshot's `limits`: the tokens of a step, and those before the shortage."""
    return replace(config, max_num_batched_tokens=limits[0]) if limits else config


def fold_memory_ran_short(state: State, event: MemoryRanShort) -> State:
    """The state in which nothing is in flight, everybody waits, and a step takes less."""
    in_flight = state.in_flight
    is_oldest = bool(in_flight) and event.step == in_flight[0].step
    require(is_oldest, f"step {event.step} lacks memory, which is not the oldest in flight")
    most = halved(state)
    require(1 <= event.limit <= most, f"steps of {event.limit} tokens behind one that lacked memory: 1 to {most} are allowed")
    require(bool(event.cause), "memory runs short without a cause")
    state = replace(state, pool=_without_unwritten(state))
    state = preempt(state, tuple(range(len(state.rows))))
    return _limited(replace(state, in_flight=(), committed=state.planned), event.limit)


def fold_step_limit_raised(state: State, event: StepLimitRaised) -> State:
    """The state in which a step may take more again."""
    limit, most = state.config.max_num_batched_tokens, state.lowered_from
    require(limit < event.limit <= most, f"steps may take {event.limit} tokens, {limit} now and at most {most} again")
    return _limited(state, event.limit)


def _limited(state: State, limit: int) -> State:
    before = state.lowered_from or state.config.max_num_batched_tokens
    config = replace(state.config, max_num_batched_tokens=limit)
    return replace(state, config=config, lowered_from=before if limit < before else 0)


def _without_unwritten(state: State) -> pools.Pool:
    """The pool in which no page has a name that a step in flight was to write: none at all where such a page may be anywhere."""
    pool = state.pool
    if not state.config.prefix_caching:
        return pool
    pages = _unwritten(state)
    if pages is None or (pool.pins is not None and bool(pool.pins.ends.at(pages).any())):
        return pools.clear_prefix_index(pool)
    return pools.without_name(pool, *pages.tolist()) if len(pages) else pool


def _unwritten(state: State) -> np.ndarray | None:
    """The pages of running requests that steps in flight were to write (int32[n]). None where others may have some: windows give
    pages back early, states are written in place, and a request that has left may have left a block behind that it did not
    complete."""
    config, rows = state.config, state.rows
    if config.windows or config.state_pages:
        return None
    row_of = {owner: row for row, owner in enumerate(zip(rows.id.tolist(), rows.preemption_count.tolist()))}
    firsts = dict[int, int]()
    for step in state.in_flight:
        for id_, preemptions, start, count in zip(*(line.tolist() for line in step.entries)):
            if (row := row_of.get((id_, preemptions))) is not None:
                firsts[row] = min(start, firsts.get(row, start))
            elif config.speculation is not None or (start + count) // config.block_size > start // config.block_size:
                return None
    found = [row_table(state, row)[first // config.block_size :] for row, first in firsts.items()]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int32)


def limits_are_lowered(state: State) -> None:
    """S9: while memory is short, steps take fewer tokens."""
    limit, before = state.config.max_num_batched_tokens, state.lowered_from
    if before and not 1 <= limit < before:
        raise LawBroken("S9", f"a step takes {limit} tokens, lowered from {before}")


def illegal(state: State) -> Iterator[AnyEvent]:
    """No step lacks memory that is not the oldest in flight, none without a cause, no limit is above the half or below one, and
    none is raised that is not lowered, or beyond what it was."""
    limit, before = state.config.max_num_batched_tokens, state.lowered_from
    yield MemoryRanShort(step=state.planned, limit=1, cause="no step")
    yield StepLimitRaised(limit=limit)
    yield StepLimitRaised(limit=max(before, limit) + 1)
    if state.in_flight:
        first = state.in_flight[0].step
        yield MemoryRanShort(step=first, limit=0, cause="no token")
        yield MemoryRanShort(step=first, limit=halved(state) + 1, cause="more than the half")
        yield MemoryRanShort(step=first, limit=1, cause="")


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {
    MemoryRanShort: fold_memory_ran_short, StepLimitRaised: fold_step_limit_raised,
}  # fmt: skip
