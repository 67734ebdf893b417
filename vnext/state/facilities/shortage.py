"""Shortage: a step that no rank could compute for lack of memory, and the tokens that steps may take from then on.

The steps in flight are over without tokens, and no page keeps a name that was to be written by them. Who runs goes on from what was
computed before, in its place and with its pages, so that each step between two shortages is progress. Where a row cannot go back
(`rewound`), everybody waits again with the tokens that are known, and hits what the cache has. A row that goes back counts as
preempted: what steps in flight owe is owed to nobody. The limit is the configuration's own, lowered, so that all decisions
follow it; `lowered_from` remembers what it was. By how much it is lowered, and when it is raised, is decided elsewhere
(vnext/sched/shortage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.allocate import table_hash
from vnext.state.block_hash import leading_hashes
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken, require
from vnext.state.events import AnyEvent, MemoryRanShort, StepLimitRaised, StepRewound
from vnext.state.params import hits_max
from vnext.state.preempt import preempt, row_tokens
from vnext.state.state import State, root_of
from vnext.state.store import extents, fields
from vnext.state.windows import row_table

replace = msgspec.structs.replace


def halved(state: State) -> int:
    """The most tokens of a step behind a shortage: half of those of the oldest step in flight, at least one. What computes whole
    prompts cannot do with less than it has."""
    limit = state.config.max_num_batched_tokens
    return max(min(state.in_flight[0].tokens // 2, limit), 1) if state.config.chunked_prefill else limit


def lowered(config: SchedulerConfig, limits: tuple[int, int] | None) -> SchedulerConfig:
    """The configuration with the first of a snapshot's `limits`: the tokens of a step, and those before the shortage."""
    return replace(config, max_num_batched_tokens=limits[0]) if limits else config


def fold_memory_ran_short(state: State, event: MemoryRanShort) -> State:
    """The state in which nothing is in flight, everybody waits, and a step takes less."""
    _require_short(state, event)
    state = replace(state, pool=_without_unwritten(state))
    state = preempt(state, tuple(range(len(state.rows))))
    return _limited(replace(state, in_flight=(), committed=state.planned), event.limit)


def fold_step_rewound(state: State, event: StepRewound) -> State:
    """The state in which nothing is in flight, everybody runs as before the oldest step, and a step takes less."""
    _require_short(state, event)
    firsts = rewound(state)
    require(firsts is not None, f"rows do not go back behind step {event.step}")
    state = replace(state, pool=_without_unwritten(state), rows=replace(state.rows, cells=state.rows.cells.copy()))
    for row, first in (firsts or {}).items():
        state = _gone_back(state, row, first)
    cells = state.rows.cells  # tables that older states read further are not written again
    tables, at = extents.compact(state.tables, cells[fields.TABLE_AT], cells[fields.BLOCKS], cells[fields.TABLE_SIZE], 0)
    cells[fields.TABLE_AT] = at
    state = replace(state, tables=tables)
    return _limited(replace(state, in_flight=(), committed=state.planned), event.limit)


def rewound(state: State) -> dict[int, int] | None:
    """How many tokens each row that steps in flight compute keeps where it goes back, by row: those before these steps, up to the
    first page that others were to write, and 0 of a prompt whose every position its result needs. None where rows do not go back:
    windows give pages back early, states are written in place, whole prompts are not cut, or unwritten pages may be anywhere."""
    firsts = None if _writes_in_place(state) or not state.config.chunked_prefill else _firsts(state)
    if firsts is None:
        return None
    pages, size = _pages_behind(state, firsts), state.config.block_size
    if _are_pinned(state, pages):
        return None
    for row, first in firsts.items():
        shared = np.isin(row_table(state, row)[: first // size], pages).nonzero()[0]
        request = state.requests[int(state.rows.id[row])]
        is_scored = hits_max(request.sampling, request.prompt_length) == 0
        firsts[row] = 0 if is_scored else int(shared[0]) * size if len(shared) else first
    return firsts


def _gone_back(state: State, row: int, first: int) -> State:
    """The state, whose rows are its own, in which a row has `first` computed tokens, and counts as preempted."""
    cells, config = state.rows.cells, state.config
    table, kept = row_table(state, row), -(-first // config.block_size)
    hashed = min(first // config.block_size, int(cells[fields.HASHED_BLOCKS, row]))
    root = root_of(state, state.requests[int(cells[fields.ID, row])])
    hashes = leading_hashes(root, row_tokens(state, row).tobytes(), config.block_size, hashed)
    cells[fields.COMPUTED, row], cells[fields.PLACEHOLDERS, row], cells[fields.BLOCKS, row] = first, 0, kept
    cells[fields.HASHED_BLOCKS, row], cells[fields.TABLE_HASH, row] = hashed, table_hash(table[:kept])
    cells[fields.BLOCK_HASH_0 :, row] = np.frombuffer(hashes[-1] if hashes else root, dtype=np.int64)
    cells[fields.PREEMPTION_COUNT, row] += 1
    rows = state.rows
    if rows.drafting is not None:
        rows = replace(rows, drafting=(drafting := rows.drafting.copy()))
        drafting[fields.TENTATIVE, row] = 0
    return replace(state, rows=rows, pool=pools.release(state.pool, table[kept:][::-1]))


def _require_short(state: State, event: MemoryRanShort) -> None:
    in_flight = state.in_flight
    is_oldest = bool(in_flight) and event.step == in_flight[0].step
    require(is_oldest, f"step {event.step} lacks memory, which is not the oldest in flight")
    most = halved(state)
    require(1 <= event.limit <= most, f"steps of {event.limit} tokens behind one that lacked memory: 1 to {most} are allowed")
    require(bool(event.cause), "memory runs short without a cause")


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
    firsts = None if _writes_in_place(state) else _firsts(state)
    if firsts is None or _are_pinned(state, pages := _pages_behind(state, firsts)):
        return pools.clear_prefix_index(pool)
    return pools.without_name(pool, *pages.tolist()) if len(pages) else pool


def _writes_in_place(state: State) -> bool:
    """Whether steps in flight write what earlier ones have: windows give pages back early, states have one page."""
    return bool(state.config.windows or state.config.state_pages)


def _are_pinned(state: State, pages: np.ndarray) -> bool:
    pins = state.pool.pins
    return pins is not None and bool(pins.ends.at(pages).any())


def _pages_behind(state: State, firsts: dict[int, int]) -> np.ndarray:
    """The pages of rows from those on that hold their next token (int32[n])."""
    found = [row_table(state, row)[first // state.config.block_size :] for row, first in firsts.items()]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int32)


def _firsts(state: State) -> dict[int, int] | None:
    """The first position that steps in flight compute of each row. None where pages of others may be unwritten too: a request that
    has left may have left a block behind that it did not complete."""
    config, rows = state.config, state.rows
    row_of = {owner: row for row, owner in enumerate(zip(rows.id.tolist(), rows.preemption_count.tolist()))}
    firsts = dict[int, int]()
    for step in state.in_flight:
        for id_, preemptions, start, count in zip(*(line.tolist() for line in step.entries)):
            if (row := row_of.get((id_, preemptions))) is not None:
                firsts[row] = min(start, firsts.get(row, start))
            elif config.speculation is not None or (start + count) // config.block_size > start // config.block_size:
                return None
    return firsts


def limits_are_lowered(state: State) -> None:
    """S9: while memory is short, steps take fewer tokens."""
    limit, before = state.config.max_num_batched_tokens, state.lowered_from
    if before and not 1 <= limit < before:
        raise LawBroken("S9", f"a step takes {limit} tokens, lowered from {before}")


def illegal(state: State) -> Iterator[AnyEvent]:
    """No step lacks memory that is not the oldest in flight, none without a cause, no limit is above the half or below one, and
    none is raised that is not lowered, or beyond what it was. Rows do not go back that cannot."""
    limit, before = state.config.max_num_batched_tokens, state.lowered_from
    yield MemoryRanShort(step=state.planned, limit=1, cause="no step")
    yield StepLimitRaised(limit=limit)
    yield StepLimitRaised(limit=max(before, limit) + 1)
    if state.in_flight:
        first = state.in_flight[0].step
        yield MemoryRanShort(step=first, limit=0, cause="no token")
        yield MemoryRanShort(step=first, limit=halved(state) + 1, cause="more than the half")
        yield MemoryRanShort(step=first, limit=1, cause="")
        yield StepRewound(step=first + 1, limit=1, cause="the next step")
        if rewound(state) is None:
            yield StepRewound(step=first, limit=1, cause="no way back")


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {
    MemoryRanShort: fold_memory_ran_short, StepRewound: fold_step_rewound, StepLimitRaised: fold_step_limit_raised,
}  # fmt: skip
