"""A steady turn in one call: the fast form of `reduce`, `schedule` and `reduce` for a commit followed by the expected plan.

A turn is steady when the step's requests are all still there, no request ends, none can be admitted, there are no
drafts, and the plan is the expected one. Its arithmetic is one call over the rows (columns.impl.turn), including the cheap
laws of both events. Any other turn, and one that breaks a law, is left to `match_samples`, `reduce` and `schedule`, with
which tests compare the plan, the state and the news (tests/sched/test_turn.py). Pure, as they are: older states stay unchanged.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from vnext.state import pool as pools
from vnext.state.drafting import decided_by, spare_tokens
from vnext.state.events import StepCommitted
from vnext.state.fold_commit import MatchedSamples
from vnext.state.outputs import Going, going_of
from vnext.state.state import State, StepInFlight
from vnext.state.store import columns, extents, fields
from vnext.state.store.columns_numpy import TURN_WORK_LINES
from vnext.state.store.rows import Rows

replace = msgspec.structs.replace
INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)  # a type would be looked up in each call
NO_DRAFTING = np.empty((0, 0), INT64)


class Turn(msgspec.Struct, frozen=True):
    """The state after a commit and the usual plan behind it, which goes on with all rows; the commit's news as in `match_samples`
    and `outputs_apart`."""

    state: State
    matched: MatchedSamples
    going: Going


def steady_turn(state: State, event: StepCommitted) -> Turn | None:
    """The turn that begins with this commit. Returns None, with nothing done, if it is not steady."""
    if (turned := _turned(state, event, recorded=False)) is None:
        return None
    reached, rows, sampled = turned
    cells, (places, nobody) = state.rows.cells, _shared(len(rows))
    matched = MatchedSamples(rows=rows, tokens=sampled, samples=places, stopped=nobody, at_limit=nobody, ended=0)
    if len(rows) < cells.shape[1]:
        return Turn(reached, matched, going_of(cells, rows, sampled))
    return Turn(reached, matched, Going(cells[fields.ID], sampled, cells[fields.CACHED]))


def steady_state(state: State, event: StepCommitted, recorded: bool = False) -> State | None:
    """The state behind that turn, for callers that need no news.

    `recorded`: a log has the expected plan behind the commit, so there is no need to check for admissions.
    """
    return None if (turned := _turned(state, event, recorded)) is None else turned[0]


def _turned(state: State, event: StepCommitted, recorded: bool) -> tuple[State, np.ndarray, np.ndarray] | None:
    """The state behind the turn, the rows that took a token (int64[n]) and their tokens (int32[n])."""
    if not _may_be_steady(state, event, recorded):
        return None
    config, cells, pool, scheduled = state.config, state.rows.cells, state.pool, state.in_flight[0]
    count, sampled, out = cells.shape[1], np.frombuffer(event.tokens, INT32), np.empty(cells.shape, INT64)
    entries, asks = np.empty((4, count), INT64), np.empty(count, bool)
    drafting = NO_DRAFTING if state.rows.drafting is None else state.rows.drafting
    work, blocks = np.empty((TURN_WORK_LINES, count), INT64), np.empty(count, INT32)
    found = columns.impl.turn(
        (cells, drafting, scheduled.entries, scheduled.samples, sampled, _ends(config.eos_token_ids)),
        (state.tokens.arena.data, state.tables.arena.data, pool.queue.arena.data, pool.status.values()),
        (out, entries, asks, work, blocks),
        (
            config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size, pool.free, pool.head,
            pool.queue.used, config.prefix_caching, not config.chunked_prefill, config.microbatches, state.planned,
        ),
        () if config.speculation is None else (*decided_by(config), spare_tokens(config)),
    )  # fmt: skip
    if found is None:
        return None
    made, total, taken, head, committed, planned = found
    tables = state.tables
    if committed or taken or planned:
        pool, tables = _paged(state, committed, blocks[:taken], head, planned)
    if made < count:
        entries, asks = entries[:, :made].copy(), asks[:made]
    drafts = None if scheduled.drafts is None else np.zeros(made, np.int64)
    next_step = StepInFlight(state.planned, entries, asks, total, drafts)
    counters = replace(state.counters, generated_tokens=state.counters.generated_tokens + len(sampled))
    reached = replace(
        state, sequence=state.sequence + 2, planned=state.planned + 1, committed=state.committed + 1, pool=pool, tables=tables,
        rows=Rows(out, state.rows.drafting), tokens=extents.own(state.tokens), in_flight=(*state.in_flight[1:], next_step),
        counters=counters, token_digest=xxhash.xxh3_64_intdigest(event.tokens, seed=state.token_digest),
    )  # fmt: skip
    return reached, work[0, : len(sampled)], sampled


def _may_be_steady(state: State, event: StepCommitted, recorded: bool) -> bool:
    """Whether the arithmetic over the rows decides alone: nothing waits for a place, and the newest state owns its arenas."""
    config, in_flight, histories, tables = state.config, state.in_flight, state.tokens, state.tables
    return not (
        len(in_flight) != config.pipeline_depth
        or event.step != in_flight[0].step
        or len(event.tokens) % 4
        or config.windows
        or config.state_pages
        or (config.inputs_a_step and (state.rows.computed < state.rows.prompt).any())
        or state.cautious
        or state.paused
        or event.counts
        or (in_flight[0].drafts is not None and in_flight[0].drafts.any())
        or (state.waiting and len(state.rows) < config.max_num_seqs and not recorded)
        or histories.version != histories.arena.version
        or tables.version != tables.arena.version
    )


def _paged(
    state: State, committed: list[tuple[bytes, int]], taken: np.ndarray, head: int, planned: list[tuple[bytes, int]]
) -> tuple[pools.Pool, extents.Extents]:
    """The pool and the tables after the commit's full blocks, the pages `taken` by the plan, and the plan's full blocks."""
    pool, tables = state.pool, state.tables
    pool = pools.insert_hashes(pool, committed) if committed else pool
    if len(taken):
        pool, tables = pools.taken(pool, taken, head), extents.own(tables)
    return pools.insert_hashes(pool, planned) if planned else pool, tables


@lru_cache(maxsize=16)
def _ends(eos_token_ids: tuple[int, ...]) -> np.ndarray:
    """The model's end tokens (int64[n])."""
    return _unwritable(np.array(eos_token_ids, np.int64))


@lru_cache(maxsize=256)
def _shared(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of `count` samples (int64[n]) and a mask of none of them (bool[n]): the same arrays in every turn."""
    return _unwritable(np.arange(count)), _unwritable(np.zeros(count, bool))


def _unwritable(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values
