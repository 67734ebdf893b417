"""Preemption: rows that return to the queue with their tokens, and what a row holds.

Owns the way out of the batch that a plan, a sleep, other weights and a recovery share. How rows end is in fold_commit.py.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.errors import require
from vnext.state.state import State, Waiting, label_of
from vnext.state.store import clients, extents
from vnext.state.store.fields import LIVE, NEWEST, SPARE
from vnext.state.store.rows import without_rows
from vnext.state.waiting_queue import enqueue, entry_of
from vnext.state.windows import row_blocks

replace = msgspec.structs.replace


def preempt(state: State, preempted: tuple[int, ...]) -> State:
    """Preempt the rows in the given order: release their blocks and return them to the queue."""
    require(len(set(preempted)) == len(preempted), "a row preempted twice in one plan")
    require(all(0 <= row < len(state.rows) for row in preempted), f"no such rows to preempt: {preempted}")
    pool, after = state.pool, clients.preempted(state, preempted)
    for row in preempted:
        pool = release_row(state, pool, row)
        state = enqueue(state, _back_in_queue(state, row))
    counters = replace(state.counters, preempted=state.counters.preempted + len(preempted))
    return replace(state, pool=pool, rows=without_rows(state.rows, preempted), counters=counters, clients=after)


def _back_in_queue(state: State, row: int) -> Waiting:
    """The queue entry of a preempted row: its known tokens. Samples not yet committed are drawn again, with the same result."""
    rows, request = state.rows, state.requests[int(state.rows.id[row])]
    tokens = row_tokens(state, row).tobytes()
    preemptions, cached = int(rows.preemption_count[row]) + 1, int(rows.cached[row])
    return entry_of(state.config, label_of(state.weights), request, tokens, preemptions, cached)


def release_row(state: State, pool: pools.Pool, row: int) -> pools.Pool:
    """The pool without this row's holds. The last block is freed first, so the beginning of a prefix outlives its end; of its state
    pages, the newest snapshot leaves the cache last."""
    pool, recurrent = pools.release(pool, row_blocks(state, row)[::-1]), state.rows.recurrent
    if pool.states is None or recurrent is None:
        return pool
    pages = recurrent[[LIVE, SPARE, NEWEST], row]
    return replace(pool, states=pools.release(pool.states, pages[pages >= 0].astype(np.int32)))


def row_tokens(state: State, row: int) -> np.ndarray:
    """The known tokens of one row (int32[known], read-only)."""
    return extents.read(state.tokens, int(state.rows.tokens_at[row]), int(state.rows.known[row]))
