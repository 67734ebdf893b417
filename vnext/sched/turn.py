"""A steady turn in one call: the fast form of `reduce`, `schedule` and `reduce` for a commit followed by the expected plan.

A turn is steady when the step's requests are still the first rows, no request ends, none can be admitted, and the plan
is the expected one. Its arithmetic is one call over the rows (columns.impl.turn), including the cheap laws of both
events. Any other turn, and one that breaks a law, is left to `match_samples`, `reduce` and `schedule`, with which tests
compare the plan, the state and the news (tests/sched/test_turn.py). Pure, as they are: older states stay unchanged.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from vnext.state import pool as pools
from vnext.state.events import StepCommitted, StepPlanned
from vnext.state.fold_commit import MatchedSamples
from vnext.state.outputs import Going, going_of
from vnext.state.state import State, StepInFlight
from vnext.state.store import columns, extents
from vnext.state.store.columns_numpy import TURN_WORK_LINES
from vnext.state.store.rows import Rows

replace = msgspec.structs.replace


class Turn(msgspec.Struct, frozen=True):
    """The plan that follows a commit, the state after both, and the commit's news as in `match_samples` and `outputs_apart`."""

    plan: StepPlanned
    state: State
    matched: MatchedSamples
    going: Going


def steady_turn(state: State, event: StepCommitted, recorded: bool = False) -> Turn | None:
    """The turn that begins with this commit. Returns None, with nothing done, if it is not steady.

    `recorded`: a log has the expected plan behind the commit, so there is no need to check for admissions.
    """
    config, in_flight, cells, pool = state.config, state.in_flight, state.rows.cells, state.pool
    count, given = cells.shape[1], len(event.tokens) // 4
    histories, tables = state.tokens, state.tables
    if (
        len(in_flight) != config.pipeline_depth
        or event.step != in_flight[0].step
        or len(event.tokens) % 4
        or config.windows
        or (state.waiting and count < config.max_num_seqs and not recorded)
        or histories.version != histories.arena.version
        or tables.version != tables.arena.version
    ):
        return None
    sampled, out = np.frombuffer(event.tokens, np.int32), np.empty_like(cells)
    entries, asks = np.empty((4, count), np.int64), np.empty(count, bool)
    work, blocks = np.empty((TURN_WORK_LINES, count), np.int64), np.empty(count, np.int32)
    found = columns.impl.turn(
        (cells, in_flight[0].entries, in_flight[0].samples, sampled, _ends(config.eos_token_ids)),
        (histories.arena.data, tables.arena.data, pool.queue.arena.data, pool.status.values()),
        (out, entries, asks, work, blocks),
        (
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold,
            config.block_size,
            pool.free,
            pool.head,
            pool.queue.used,
            config.prefix_caching,
            not config.chunked_prefill,
        ),
    )
    if found is None:
        return None
    made, total, taken, head, committed, planned = found
    pool = pools.insert_hashes(pool, committed) if committed else pool
    if taken:
        pool, tables = pools.taken(pool, blocks[:taken], head), extents.own(tables)
    pool = pools.insert_hashes(pool, planned) if planned else pool
    if made < count:
        entries, asks = entries[:, :made].copy(), asks[:made]
    counters = state.counters
    reached = replace(
        state, sequence=state.sequence + 2, planned=state.planned + 1, committed=state.committed + 1, rows=Rows(out),
        tokens=extents.own(histories), tables=tables, pool=pool,
        in_flight=(*in_flight[1:], StepInFlight(state.planned, entries, asks, total)),
        counters=replace(counters, generated_tokens=counters.generated_tokens + given),
        token_digest=xxhash.xxh3_64_intdigest(event.tokens, seed=state.token_digest),
    )  # fmt: skip
    rows, (places, nobody) = work[0, :given], _shared(given)
    matched = MatchedSamples(rows=rows, tokens=sampled, samples=places, stopped=nobody, at_limit=nobody, ended=0)
    going = going_of(cells, rows, sampled)
    return Turn(StepPlanned(step=state.planned), reached, matched, going)


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
