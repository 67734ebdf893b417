"""A steady turn in one call: the fast form of `reduce`, `schedule` and `reduce` for a commit followed by the expected plan.

A turn is steady when the step's requests are all still there, no request ends, none can be admitted, there are no
drafts, and the plan is the expected one. Its arithmetic is one call over the rows (columns.impl.turn), including the cheap
laws of both events. Any other turn, and one that breaks a law, is left to `match_samples`, `reduce` and `schedule`, with
which tests compare the plan, the state and the news (tests/sched/test_turn.py). Pure, as they are: older states stay unchanged.
Several turns, one behind the other, are one call too (columns.impl.turns), for callers that need no state between them; a plan
alone may be before them, a commit alone behind them, and requests may have left since their step was planned.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import xxhash

from vnext.sched.admission import admissible, lacking_pages
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
NOBODY_WAITS = (0, 0)
ORDERED_BY_ARRIVALS = ("fcfs", "priority")
"""Policies whose best waiting request stays the same while nobody comes or leaves."""
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
    scheduled = state.in_flight[0] if len(state.in_flight) == state.config.pipeline_depth else None
    if scheduled is None or event.step != scheduled.step or len(event.tokens) % 4 or event.counts:
        return None
    if (scheduled.drafts is not None and scheduled.drafts.any()) or not _may_be_steady(state):
        return None
    if (waits := NOBODY_WAITS if recorded or not state.waiting else _waiting(state)) is None:
        return None
    config, rows, cells, pool = state.config, state.rows, state.rows.cells, state.pool
    count, sampled, out = cells.shape[1], np.frombuffer(event.tokens, INT32), np.empty(cells.shape, INT64)
    entries, asks = np.empty((4, count), INT64), np.empty(count, bool)
    work, blocks = np.empty((TURN_WORK_LINES, count), INT64), np.empty(count, INT32)
    drafting = NO_DRAFTING if rows.drafting is None else rows.drafting
    found = columns.impl.turn(
        (cells, drafting, scheduled.entries, scheduled.samples, sampled, _ends(config.eos_token_ids)),
        (state.tokens.arena.data, state.tables.arena.data, pool.queue.arena.data, pool.status.values()),
        (out, entries, asks, work, blocks),
        (
            config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size, pool.free, pool.head,
            pool.queue.used, config.prefix_caching, not config.chunked_prefill, config.microbatches, state.planned, *waits,
        ),
        () if config.speculation is None else (*decided_by(config), spare_tokens(config)),
    )  # fmt: skip
    if found is None:
        return None
    (made, total, taken, head, committed, planned), tables = found, state.tables
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


class Run(msgspec.Struct, frozen=True):
    """Steady turns, one behind the other: the state behind them and how many tokens each commit has. `leads`: a plan alone was
    before them; `ended`: the last commit is alone, and the rows `gone` of the state are still to end with it."""

    state: State
    counts: list[int]
    leads: bool
    ended: bool
    gone: list[int]


def steady_run(state: State, tokens: memoryview, most: int, ends: bool = False) -> Run | None:
    """The state behind as many steady turns as there are, up to `most`, whose commits have these tokens (int32), each as many as
    its step asks for; samples of requests that have left are dropped. A plan leads them where one is due, and a commit alone is
    behind them if the next turn is not steady, or they are `most` and it `ends` them. None if nothing is steady, or tokens lack."""
    config, depth, (fields, count) = state.config, state.config.pipeline_depth, state.rows.cells.shape
    if any([scheduled.drafts is not None and scheduled.drafts.any() for scheduled in state.in_flight]):
        return None
    leads = len(state.in_flight) < depth
    waits = _waiting(state) if most or leads else NOBODY_WAITS
    if len(state.in_flight) + leads != depth or not _may_be_steady(state) or waits is None:
        return None
    width = max([count, *[scheduled.entries.shape[1] for scheduled in state.in_flight]])
    cells, entries = np.empty((2, fields, count), INT64), np.empty((depth + 1, 4, width), INT64)
    asks, made = np.empty((depth + 1, width), bool), np.empty((leads + most + ends, 4), INT64)
    work, blocks, pool = np.empty((TURN_WORK_LINES, count), INT64), np.empty((leads + most + ends) * count, INT32), state.pool
    in_flight = tuple([(scheduled.entries, scheduled.samples) for scheduled in state.in_flight])
    found = columns.impl.turns(
        (
            state.rows.cells, NO_DRAFTING if state.rows.drafting is None else state.rows.drafting, in_flight,
            np.frombuffer(tokens, INT32), _ends(config.eos_token_ids),
        ),
        (state.tokens.arena.data, state.tables.arena.data, pool.queue.arena.data, pool.status.values()),
        (cells, entries, asks, work, blocks, made),
        *_numbers(state, waits),
        (depth, most, leads, ends),
    )  # fmt: skip
    if found is None:
        return None
    turns, ended, taken, head, gone, moves = found
    made = made[: leads + turns + ended]
    digest, drawn, counts = state.token_digest, 0, made[leads:, 2].tolist()
    for given in counts:
        digest = xxhash.xxh3_64_intdigest(tokens[drawn : drawn + 4 * given], seed=digest)
        drawn += 4 * given
    if moves:
        pool = pools.moved(pool, blocks[:taken].copy(), head, moves)
    rows, tables = Rows(cells[(len(made) - 1) % 2], state.rows.drafting), extents.own(state.tables) if taken else state.tables
    steps = _steps(state, made[: leads + turns], len(counts), entries, asks)
    reached = _reached(state, (leads + turns, len(counts)), int(made[:, 3].sum()), rows, steps, pool, tables, digest)
    return Run(reached, counts, leads, ended, work[1, :gone].tolist())


def _numbers(state: State, waits: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last two arguments of `columns.impl.turn`, which `_turned` makes itself: a call would cost it a thousand instructions."""
    config, pool = state.config, state.pool
    return (
        config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size, pool.free, pool.head,
        pool.queue.used, config.prefix_caching, not config.chunked_prefill, config.microbatches, state.planned, *waits,
    ), () if config.speculation is None else (*decided_by(config), spare_tokens(config))  # fmt: skip


def _steps(state: State, made: np.ndarray, committed: int, entries: np.ndarray, asks: np.ndarray) -> tuple[StepInFlight, ...]:
    """The steps in flight after so many commits, those that turns planned among them; arrays as `columns.impl.turns` fills them."""
    given, has_drafts, steps = len(state.in_flight), state.config.speculation is not None, list(state.in_flight[committed:])
    for turn in range(max(committed - given, 0), len(made)):
        (size, total, _, _), slot = made[turn].tolist(), (turn + given) % len(entries)
        whole = entries[slot] if size == entries.shape[2] else entries[slot, :, :size].copy()
        drafts = np.zeros(size, INT64) if has_drafts else None
        steps.append(StepInFlight(state.planned + turn, whole, asks[slot, :size], total, drafts))
    return tuple(steps)


def _may_be_steady(state: State) -> bool:
    """Whether the arithmetic over the rows decides alone, where commits have no drafts: the newest state owns its arenas."""
    config, histories, tables = state.config, state.tokens, state.tables
    return not (
        config.windows
        or config.state_pages
        or (config.inputs_a_step and (state.rows.computed < state.rows.prompt).any())
        or state.cautious
        or state.paused
        or histories.version != histories.arena.version
        or tables.version != tables.arena.version
    )


def _waiting(state: State) -> tuple[int, int] | None:
    """The tokens of the first request that waits, and how many blocks have to get names before it might have hits enough to join;
    zeros if nobody can join, None if it takes a trial to know."""
    config, pool = state.config, state.pool
    if not state.waiting or len(state.rows) >= config.max_num_seqs:
        return NOBODY_WAITS
    if config.policy not in ORDERED_BY_ARRIVALS or config.inputs_a_step or state.slots or state.tier is not None:
        return None
    if not (places := admissible(state, 1)):
        return NOBODY_WAITS
    waiting = state.waiting[places[0]]
    if waiting.known > (config.long_prefill_token_threshold or waiting.known):
        return None
    lacks = lacking_pages(config, pool, waiting, pool.free)
    return (waiting.known, lacks) if lacks > 0 else None


def _paged(
    state: State, committed: list[tuple[bytes, int]], taken: np.ndarray, head: int, planned: list[tuple[bytes, int]]
) -> tuple[pools.Pool, extents.Extents]:
    """The pool and the tables after the commit's full blocks, the pages `taken` by the plan, and the plan's full blocks."""
    pool, tables = state.pool, state.tables
    pool = pools.insert_hashes(pool, committed) if committed else pool
    if len(taken):
        pool, tables = pools.taken(pool, taken, head), extents.own(tables)
    return pools.insert_hashes(pool, planned) if planned else pool, tables


def _reached(
    state: State, events: tuple[int, int], tokens: int, rows: Rows, steps: tuple[StepInFlight, ...], pool: pools.Pool,
    tables: extents.Extents, digest: int,
) -> State:
    """The state after so many plans and commits, which took so many `tokens`, with these steps in flight."""
    counters, (planned, committed) = state.counters, events
    return replace(
        state, sequence=state.sequence + planned + committed, planned=state.planned + planned,
        committed=state.committed + committed, rows=rows, tokens=extents.own(state.tokens) if committed else state.tokens,
        tables=tables, pool=pool, in_flight=steps,
        counters=replace(counters, generated_tokens=counters.generated_tokens + tokens), token_digest=digest,
    )  # fmt: skip


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
