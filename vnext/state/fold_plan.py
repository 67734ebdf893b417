"""Fold StepPlanned: preempt, advance, hash full blocks, admit, and record the step in flight.

The order is part of the meaning. Running rows take their pages first, in order. Admitted requests follow, and one may
share blocks that another request admitted before it completes in this same step, because a step writes all keys and
values of a layer before any query reads them. Then the blocks that running rows complete enter the prefix index, and
pages that no later step reads are given back last.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.allocate import Allocation, allocate, fits, hit_tokens_of, new_row, prefix_hits, table_size, tokens_size
from vnext.state.drafting import draft_room, drafts_a_step
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import StepPlanned
from vnext.state.expected import Work, expected_work, work_of
from vnext.state.facilities.adapters import may_run, used
from vnext.state.facilities.encoding import with_begun
from vnext.state.facilities.tier import transferring
from vnext.state.preempt import preempt
from vnext.state.recurrent import lacking, name_snapshots, new_column, source_of, with_copies
from vnext.state.state import State, StepInFlight, Waiting, root_of
from vnext.state.store import clients, columns, extents, fields
from vnext.state.store.rows import Rows, more_rows, wants
from vnext.state.waiting_queue import dequeue
from vnext.state.windows import give_back, window_bytes

replace = msgspec.structs.replace
NO_ROWS = np.empty(0, dtype=np.int64)
ALL_SEEN = bytes(8)  # one group with full attention, as `columns.hash_full_blocks` takes windows


def fold_step_planned(state: State, event: StepPlanned) -> State:
    """The state in which the step runs. IllegalEvent, with nothing changed, if the plan breaks a bound."""
    if event.step != state.planned:
        raise IllegalEvent(f"step {event.step} planned where step {state.planned} is due")
    if state.paused not in ("", "wait"):
        raise IllegalEvent(f"step {event.step} planned in an engine that is paused ({state.paused})")
    if len(state.in_flight) >= state.config.pipeline_depth:
        raise IllegalEvent(f"step {event.step} planned with {len(state.in_flight)} steps in flight already")
    if event.preempted and event.admitted:
        raise IllegalEvent("a plan that preempts may not admit")
    if event.preempted:
        state = preempt(state, event.preempted)
    work = planned_work(state, event.changed, drafts=not event.preempted)
    before, starts, total, running = state.rows, state.rows.computed, work.tokens_sum, len(state.rows)
    state = advance(state, work)
    sources: list[tuple[int, int]] = []
    if event.admitted:
        state, added_starts, added_tokens, sources = _admit_all(state, event.admitted)
        starts = np.concatenate((starts, added_starts))
        drafts = None if work.drafts is None else np.concatenate((work.drafts, np.zeros_like(added_tokens)))
        work = replace(work, tokens=np.concatenate((work.tokens, added_tokens)), drafts=drafts)
        total += int(added_tokens.sum())
    if not 0 < total <= state.config.max_num_batched_tokens:
        raise IllegalEvent(f"a step of {total} tokens where 1 to {state.config.max_num_batched_tokens} are allowed")
    if state.config.input_units:
        state = with_begun(state, starts, work.tokens, running, strictly=not (event.preempted or event.changed))
    scheduled = _step_in_flight(state, starts, work, total)
    pool = hash_full_blocks(state)
    if state.config.windows:
        at_least = np.concatenate((before.computed_at_least, starts[running:]))
        pool = give_back(replace(state, pool=pool), at_least)
    state = replace(state, pool=pool, planned=state.planned + 1)
    if state.rows.recurrent is not None:
        state, scheduled = with_copies(state, scheduled, sources)
        state = name_snapshots(state)
    state = replace(state, in_flight=(*state.in_flight, scheduled))
    return _less_cautious(state) if state.cautious else state


def _less_cautious(state: State) -> State:
    """The state without caution if every request that it was for has come and has joined the batch."""
    waits = state.next_id < state.cautious or any(entry.id < state.cautious for entry in state.waiting)
    return state if waits else replace(state, cautious=0)


def _step_in_flight(state: State, starts: np.ndarray, work: Work, total: int) -> StepInFlight:
    """The step in flight: one entry for each row that has tokens."""
    tokens, rows = work.tokens, len(work.tokens)
    entries, samples = np.empty((4, rows), dtype=np.int64), np.empty(rows, dtype=bool)
    count = columns.impl.step_entries(state.rows.cells, starts, tokens, entries, samples)
    if count < rows:
        entries, samples = entries[:, :count].copy(), samples[:count]
    drafts = None if work.drafts is None else work.drafts[tokens > 0]
    return StepInFlight(state.planned, entries, samples, total, drafts)


# ---- running rows ------------------------------------------------------------------------------------------------


def planned_work(state: State, changed: tuple[tuple[int, int], ...], drafts: bool = True) -> Work:
    """The work of each row: the expected work, with or without drafts, with the plan's changes."""
    config, rows = state.config, state.rows
    work = expected_work(state, drafts)
    if not changed:
        return work
    wanted, tokens = wants(rows), work.tokens.copy()
    most = wanted + draft_room(config, rows) if drafts and config.speculation else wanted
    for row, count in changed:
        require(0 <= row < len(tokens), f"no such row: {row}")
        require(0 <= count <= most[row], f"row {row} cannot take {count} tokens: it wants {most[row]}")
        tokens[row] = count
    drafted = np.maximum(tokens - wanted, 0) if config.speculation else None
    if config.state_pages and drafted is not None:
        require(drafted.sum() <= drafts_a_step(config), f"a step of more than {drafts_a_step(config)} drafts")
    return work_of(state, tokens, drafted)


def advance(state: State, work: Work) -> State:
    """Every row computes its tokens and takes its pages, in row order."""
    rows, pool, tables = state.rows, state.pool, state.tables
    if rows.cells.shape[1] == 0:
        return state
    if work.pages_sum > pool.free:
        raise IllegalEvent(f"a plan needs {work.pages_sum} blocks where {pool.free} are free")
    cells, drafting = np.empty_like(rows.cells), rows.drafting
    columns.impl.advance(rows.cells, cells, work.tokens if work.drafts is None else work.tokens - work.drafts, work.blocks)
    if work.drafts is not None and drafting is not None:
        drafting = drafting.copy()
        for line in (cells[fields.COMPUTED], cells[fields.PLACEHOLDERS], drafting[fields.TENTATIVE]):
            line += work.drafts
    if work.pages_sum:
        pool, blocks = pools.take(pool, work.pages_sum)
        tables = extents.own(tables)
        groups = len(state.config.windows) or 1
        columns.impl.write_tables(cells, work.blocks, blocks, tables.arena.data, groups)
    return replace(state, rows=Rows(cells, drafting, rows.recurrent), pool=pool, tables=tables)


def hash_full_blocks(state: State, ended: np.ndarray = NO_ROWS, given_back: bool = False) -> pools.Pool:
    """The pool with hashes for the blocks whose tokens are all known and computed.

    `given_back`: whether the rows have already given back the pages outside their windows; a plan does so last. Writes
    HASHED_BLOCKS and BLOCK_HASH of the rows, so the matrix must belong to this state alone. The last token of a row in
    `ended` does not count: whether a step in flight computes it depends on the pipeline's depth, and the contents of the
    prefix index must not.
    """
    config, cells = state.config, state.rows.cells
    if not config.prefix_caching or cells.shape[1] == 0:
        return state.pool
    arenas = state.tokens.arena.data, state.tables.arena.data
    windows = window_bytes(config.windows, given_back) if config.windows else ALL_SEEN
    pairs = columns.impl.hash_full_blocks(cells, ended, *arenas, config.block_size, windows)
    return pools.insert_hashes(state.pool, pairs) if pairs else state.pool


# ---- admission ---------------------------------------------------------------------------------------------------


def _admit_all(
    state: State, admitted: tuple[tuple[int, int], ...]
) -> tuple[State, np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Admit waiting requests in order; returns the state, their first computed positions, their tokens, and the copies of state
    pages that the step begins with."""
    places = [place for place, _ in admitted]
    if len(set(places)) < len(places):
        raise IllegalEvent("a request admitted twice in one plan")
    if not all(0 <= place < len(state.waiting) for place in places):
        raise IllegalEvent(f"no such places in the queue: {places}")
    if len(admitted) > (room := state.config.max_num_seqs - len(state.rows)):
        raise IllegalEvent(f"{len(admitted)} requests admitted where the batch has room for {room}")
    entries = [state.waiting[place] for place in places]
    if (state.tier is not None or state.sought is not None) and (moving := transferring(state)):
        require(not any(entry.id in moving for entry in entries), "a request joins for which ranks still read")
    if state.slots:
        state = _with_adapters(state, entries)
    wanted = [state.requests[entry.id] for entry in entries]
    histories = sum(map(tokens_size, wanted, entries))
    state = _with_room(state, histories, sum(table_size(state.config, request) for request in wanted))
    rows, starts, states, sources = [], [], [], []
    for entry, (_, tokens) in zip(entries, admitted):
        state, row, allocation = admit(state, entry, tokens)
        rows.append(row)
        starts.append(allocation.hit_tokens)
        if allocation.pool.states is not None:
            states.append(new_column(allocation.states))
        if allocation.source >= 0:
            sources.append((allocation.source, int(allocation.states[0])))
    counts = np.array([tokens for _, tokens in admitted], dtype=np.int64)
    after = clients.admitted(state, [entry.id for entry in entries], starts)
    state = replace(dequeue(state, set(places)), rows=more_rows(state.rows, rows, states), clients=after)
    return state, np.array(starts, dtype=np.int64), counts, sources


def _with_adapters(state: State, entries: list[Waiting]) -> State:
    """The state in which these requests' adapters were used last. Each must be in a slot."""
    for entry in entries:
        require(may_run(state, entry.id), f"request {entry.id} needs an adapter that is in no slot")
    return used(state, {state.requests[entry.id].sampling.adapter for entry in entries})


def admit(state: State, waiting: Waiting, tokens: int) -> tuple[State, np.ndarray, Allocation]:
    """The state with a request's pages, history and table; the row it becomes; and what it was allocated.

    Changes neither the rows nor the queue.
    """
    config, request = state.config, state.requests[waiting.id]
    hits = prefix_hits(config, state.pool, waiting)
    start = hit_tokens_of(config, hits)
    if not 1 <= tokens <= waiting.known - start:
        raise IllegalEvent(f"request {waiting.id} cannot start with {tokens} tokens")
    if not fits(config, state.pool, hits, tokens):
        raise IllegalEvent(f"no blocks for request {waiting.id}")
    if (states := state.pool.states) is not None:
        source = source_of(states, waiting, len(hits) // config.group_count)
        require(not lacking(config, states, source), f"no state pages for request {waiting.id}")
    allocation = allocate(config, state.pool, waiting, hits, tokens)
    sizes = tokens_size(request, waiting), table_size(config, request)
    tokens_at, table_at, counters = state.tokens.used, state.tables.used, state.counters
    histories, tables = extents.own(state.tokens, sizes[0]), extents.own(state.tables, sizes[1])
    places = (tokens_at, sizes[0]), (table_at, sizes[1])
    row = new_row(config, request, waiting, allocation, tokens, *places, root_of(state, request))
    return replace(
        state,
        pool=allocation.pool,
        tokens=extents.write(histories, slice(tokens_at, tokens_at + waiting.known), np.frombuffer(waiting.tokens, "<i4")),
        tables=extents.write(tables, slice(table_at, table_at + len(allocation.table)), allocation.table),
        counters=replace(
            counters,
            prompt_tokens=counters.prompt_tokens + request.prompt_length * (waiting.cached < 0),
            prefix_queried_tokens=counters.prefix_queried_tokens + waiting.known * bool(config.prefix_caching),
            prefix_hit_tokens=counters.prefix_hit_tokens + start,
        ),
    ), row, allocation


def _with_room(state: State, tokens_places: int, table_places: int) -> State:
    """The state with arenas that have at least this many places left."""
    if state.tokens.used + tokens_places > state.tokens.capacity:
        rows = state.rows
        tokens, at = extents.compact(
            state.tokens, rows.tokens_at, rows.known, rows.cells[fields.TOKENS_SIZE], tokens_places
        )
        state = replace(state, tokens=tokens, rows=_with_cells(rows, {fields.TOKENS_AT: at}))
    if state.tables.used + table_places > state.tables.capacity:
        rows = state.rows
        counts, sizes = rows.blocks * state.config.group_count, rows.cells[fields.TABLE_SIZE]
        tables, at = extents.compact(state.tables, rows.table_at, counts, sizes, table_places)
        state = replace(state, tables=tables, rows=_with_cells(rows, {fields.TABLE_AT: at}))
    return state


def move_tokens(state: State, moving: np.ndarray, sizes: np.ndarray) -> State:
    """Move the histories of the rows `moving` (int64[n]) to extents of the given `sizes` (int64[n]); the others stay."""
    state = _with_room(state, int(sizes.sum()), 0)
    rows = state.rows
    tokens, at = extents.move(state.tokens, rows.tokens_at[moving], rows.known[moving], sizes)
    cells = rows.cells.copy()
    cells[fields.TOKENS_AT, moving], cells[fields.TOKENS_SIZE, moving] = at, sizes
    return replace(state, tokens=tokens, rows=replace(rows, cells=cells))


def _with_cells(rows: Rows, fields: dict[int, np.ndarray]) -> Rows:
    cells = rows.cells.copy()
    for field, values in fields.items():
        cells[field] = values
    return replace(rows, cells=cells)
