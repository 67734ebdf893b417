"""Fold StepPlanned: preempt, advance, seal, admit, and remember the step in flight.

The order is part of the meaning: running rows take their blocks first, in order; admitted requests follow, and one may
share blocks that another admitted before it completes in this very step (a step writes all keys and values of a layer
before anybody reads them); what running rows complete is named last.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import columns as column_forms, extents, pool as pools, rows as columns
from vnext.state.admitting import claim, fits, new_row, prefix_hits, table_size, tokens_size, write_history, write_table
from vnext.state.chain import KEY_SIZE, chain_keys, child_key
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import StepPlanned
from vnext.state.expected import blocks_needed, expected_tokens
from vnext.state.lifecycle import Change, Status, after
from vnext.state.order import enqueue
from vnext.state.rows import Rows, kept_rows, wants
from vnext.state.state import Flight, State, Waiting

replace = msgspec.structs.replace
NO_ROWS = np.empty(0, dtype=np.int64)


def fold_step_planned(state: State, event: StepPlanned) -> State:
    """The state in which the step runs. IllegalEvent if the plan breaks a bound; nothing is changed then."""
    _require_due(state, event)
    if event.preempted:
        state = preempt(state, event.preempted)
    tokens = planned_tokens(state, event.changed)
    starts = state.rows.computed
    state = advance(state, tokens)
    if event.admitted:
        state, added_starts, added_tokens = _admit_all(state, event.admitted)
        starts, tokens = np.concatenate((starts, added_starts)), np.concatenate((tokens, added_tokens))
    state = seal(state)
    total = int(tokens.sum())
    if not 0 < total <= state.config.batch_tokens_max:
        raise IllegalEvent(f"a step of {total} tokens where 1 to {state.config.batch_tokens_max} are allowed")
    return replace(state, planned=state.planned + 1, flights=(*state.flights, _flight(state, starts, tokens)))


def _require_due(state: State, event: StepPlanned) -> None:
    """This step is the next, there is room for it in the pipeline, and it does not admit while it preempts."""
    if event.step != state.planned:
        raise IllegalEvent(f"step {event.step} planned where step {state.planned} is due")
    if len(state.flights) >= state.config.pipeline_depth:
        raise IllegalEvent(f"step {event.step} planned with {len(state.flights)} steps in flight already")
    if event.preempted and event.admitted:
        raise IllegalEvent("a plan that preempts may not admit")


def _flight(state: State, starts: np.ndarray, tokens: np.ndarray) -> Flight:
    """The step in flight. A scheduled row with a pending token samples in this step: it has caught up with all it knows.

    Columns of matrices that are never written again need no copy where every row is scheduled.
    """
    rows, samples = state.rows, state.rows.pending > 0
    if tokens.all():
        return Flight(
            step=state.planned, ids=rows.id, epochs=rows.epoch, starts=starts, counts=tokens, samples=samples
        )
    scheduled = tokens.nonzero()[0]
    return Flight(
        step=state.planned,
        ids=rows.id[scheduled],
        epochs=rows.epoch[scheduled],
        starts=starts[scheduled],
        counts=tokens[scheduled],
        samples=samples[scheduled],
    )


# ---- preemption --------------------------------------------------------------------------------------------------


def preempt(state: State, preempted: tuple[int, ...]) -> State:
    """The rows give way, in the order named: their blocks are released and they return to the queue."""
    require(len(set(preempted)) == len(preempted), "a row preempted twice in one plan")
    require(all(0 <= row < len(state.rows) for row in preempted), f"no such rows to preempt: {preempted}")
    pool, queue = state.pool, state.waiting
    for row in preempted:
        after(Status.RUNNING, Change.PREEMPT)
        pool = release_row(state, pool, row)
        queue = enqueue(queue, _back_in_queue(state, row))
    counters = replace(state.counters, preempted=state.counters.preempted + len(preempted))
    return replace(state, pool=pool, waiting=queue, rows=without_rows(state.rows, preempted), counters=counters)


def _back_in_queue(state: State, row: int) -> Waiting:
    """What a preempted row remembers: its known tokens. What it had sampled and not committed is sampled again, equal."""
    rows, config = state.rows, state.config
    request = state.requests[int(rows.id[row])]
    tokens = row_tokens(state, row).tobytes()
    return Waiting(
        id=request.id,
        priority=request.priority,
        tokens=tokens,
        keys=chain_keys(request.root, tokens, config.block_size) if config.prefix_caching else (),
        epoch=int(rows.epoch[row]) + 1,
        cached=int(rows.cells[columns.CACHED, row]),
    )


def release_row(state: State, pool: pools.Pool, row: int) -> pools.Pool:
    """The pool without this row's holds; the last block is freed first, so that prefixes outlive tails."""
    return pools.release(pool, row_blocks(state, row)[::-1])


def row_blocks(state: State, row: int) -> np.ndarray:
    """Block table of one row (int32[blocks], read-only)."""
    return extents.read(state.tables, int(state.rows.table_at[row]), int(state.rows.blocks[row]))


def row_tokens(state: State, row: int) -> np.ndarray:
    """Known tokens of one row (int32[known], read-only)."""
    return extents.read(state.tokens, int(state.rows.tokens_at[row]), int(state.rows.known[row]))


def without_rows(rows: Rows, gone: tuple[int, ...] | list[int]) -> Rows:
    keep = np.ones(len(rows), dtype=bool)
    keep[list(gone)] = False
    return kept_rows(rows, keep)


# ---- running rows ------------------------------------------------------------------------------------------------


def planned_tokens(state: State, changed: tuple[tuple[int, int], ...]) -> np.ndarray:
    """New tokens of each row: the expected ones with the plan's changes."""
    tokens = expected_tokens(state.config, state.rows)
    if not changed:
        return tokens
    wanted = wants(state.rows)
    for row, count in changed:
        require(0 <= row < len(tokens), f"no such row: {row}")
        require(0 <= count <= wanted[row], f"row {row} cannot take {count} tokens: it wants {wanted[row]}")
        tokens[row] = count
    return tokens


def advance(state: State, tokens: np.ndarray) -> State:
    """Every row computes so many tokens more; blocks are taken in row order."""
    rows = state.rows
    if len(rows) == 0:
        return state
    need, total = blocks_needed(state.config, rows, tokens)
    if total > state.pool.free:
        raise IllegalEvent(f"a plan needs {total} blocks where {state.pool.free} are free")
    cells = np.empty_like(rows.cells)
    column_forms.kernels.advance(rows.cells, cells, tokens, need)
    pool, tables = state.pool, state.tables
    if total:
        pool, blocks = pools.take(pool, total)
        tables = extents.own(tables)
        column_forms.kernels.write_tables(cells, need, blocks, tables.arena.data)
    return replace(state, rows=Rows(cells), pool=pool, tables=tables)


def seal(state: State, ended: np.ndarray = NO_ROWS) -> State:
    """Name the blocks whose tokens are all known and computed. The rows' matrix must be this state's own, still fresh.

    The last token of a row that has `ended` does not count: whether a step in flight computes it depends on the
    pipeline's depth, and what the cache offers may not.
    """
    if not state.config.prefix_caching:
        return state
    cells, size = state.rows.cells, state.config.block_size
    found = np.empty(cells.shape[1], dtype=np.int64)
    pairs: list[tuple[bytes, int]] = []
    while count := column_forms.kernels.unsealed(cells, ended, size, found):
        pairs += _seal_next(state, found[:count])
    return replace(state, pool=pools.name(state.pool, pairs)) if pairs else state


def _seal_next(state: State, rows: np.ndarray) -> list[tuple[bytes, int]]:
    """Chain keys and blocks of these rows' next full block each; writes their SEALED and CHAIN cells."""
    cells, size = state.rows.cells, state.config.block_size
    kernels, width = column_forms.kernels, 4 * size
    tokens, parents, blocks = kernels.seal_inputs(cells, rows, state.tokens.arena.data, state.tables.arena.data, size)
    keys = [
        child_key(parents[at * KEY_SIZE : (at + 1) * KEY_SIZE], tokens[at * width : (at + 1) * width])
        for at in range(len(rows))
    ]
    kernels.seal_write(cells, rows, b"".join(keys))
    return list(zip(keys, blocks))


# ---- admission ---------------------------------------------------------------------------------------------------


def _admit_all(state: State, admitted: tuple[tuple[int, int], ...]) -> tuple[State, np.ndarray, np.ndarray]:
    """Admit waiting requests in order; returns their first computed positions and tokens beside the state."""
    places = [place for place, _ in admitted]
    require(len(set(places)) == len(places), "a request admitted twice in one plan")
    require(all(0 <= place < len(state.waiting) for place in places), f"no such places in the queue: {places}")
    room = state.config.running_max - len(state.rows)
    require(len(admitted) <= room, f"{len(admitted)} requests admitted where the batch has room for {room}")
    queue, starts = state.waiting, []
    for place, tokens in admitted:
        state, start = admit(state, queue[place], tokens)
        starts.append(start)
    gone = set(places)
    rest = tuple(entry for place, entry in enumerate(queue) if place not in gone)
    counts = np.array([tokens for _, tokens in admitted], dtype=np.int64)
    return replace(state, waiting=rest), np.array(starts, dtype=np.int64), counts


def admit(state: State, waiting: Waiting, tokens: int) -> tuple[State, int]:
    """One more row. Returns the state (the queue unchanged) and the first position that is computed."""
    after(Status.WAITING, Change.ADMIT)
    config, request = state.config, state.requests[waiting.id]
    hits = prefix_hits(config, state.pool, waiting)
    start = len(hits) * config.block_size
    require(1 <= tokens <= waiting.known - start, f"request {waiting.id} cannot start with {tokens} tokens")
    require(fits(config, state.pool, hits, tokens), f"no blocks for request {waiting.id}")
    claimed = claim(config, state.pool, waiting, hits, tokens)
    state = _with_room(state, tokens_size(request, waiting), table_size(config, request))
    histories, tokens_at = extents.reserve(state.tokens, tokens_size(request, waiting))
    tables, table_at = extents.reserve(state.tables, table_size(config, request))
    row = new_row(config, request, waiting, claimed, tokens, tokens_at, table_at)
    return replace(
        state,
        pool=claimed.pool,
        tokens=write_history(histories, waiting, tokens_at),
        tables=write_table(tables, claimed, table_at),
        rows=Rows(np.concatenate((state.rows.cells, row[:, None]), axis=1)),
        counters=_counted(state, waiting, request.prompt_length, start),
    ), start


def _counted(state: State, waiting: Waiting, prompt_length: int, hit_tokens: int):
    counters = state.counters
    first = waiting.cached < 0
    return replace(
        counters,
        prompt_tokens=counters.prompt_tokens + prompt_length * first,
        prefix_queried_tokens=counters.prefix_queried_tokens + waiting.known * bool(state.config.prefix_caching),
        prefix_hit_tokens=counters.prefix_hit_tokens + hit_tokens,
    )


def _with_room(state: State, tokens_places: int, table_places: int) -> State:
    """Arenas with so many places left."""
    if state.tokens.used + tokens_places > state.tokens.capacity:
        state = move_tokens(state, state.rows.cells[columns.TOKENS_SIZE], tokens_places)
    if state.tables.used + table_places > state.tables.capacity:
        rows = state.rows
        tables, at = extents.compact(state.tables, rows.table_at, rows.blocks, rows.cells[columns.TABLE_SIZE], table_places)
        state = replace(state, tables=tables, rows=_with_cells(rows, {columns.TABLE_AT: at}))
    return state


def move_tokens(state: State, sizes: np.ndarray, extra: int) -> State:
    """All live histories in a fresh arena, with extents of the given sizes (int64[R]) and `extra` places more."""
    rows = state.rows
    tokens, at = extents.compact(state.tokens, rows.tokens_at, rows.known, sizes, extra)
    return replace(state, tokens=tokens, rows=_with_cells(rows, {columns.TOKENS_AT: at, columns.TOKENS_SIZE: sizes}))


def _with_cells(rows: Rows, fields: dict[int, np.ndarray]) -> Rows:
    cells = rows.cells.copy()
    for field, values in fields.items():
        cells[field] = values
    return Rows(cells)
