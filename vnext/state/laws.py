"""Laws: what must hold in every state, each a small function named after its entry in docs/laws.md.

`check_cheap` is a few array sums and always on in the engine; `check` is everything and on in tests, in the simulator and
in `vnext-replay verify --laws`. A broken law is a bug of the engine, never of a client.
"""

from __future__ import annotations

import numpy as np

from vnext.state import columns, extents
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken
from vnext.state.extents import Extents
from vnext.state.order import sum_of
from vnext.state.pool import free_blocks
from vnext.state.state import Flight, State
from vnext.state.windows import first_kept, held_entries, row_table

WORD = 2**64 - 1


def check(state: State) -> None:
    """All laws of one state. Raises LawBroken."""
    for law in ALL:
        law(state)


def check_cheap(state: State) -> None:
    """The laws that cost a microsecond or two: CHEAP, asked in one pass and named one by one if it fails. Raises LawBroken."""
    if not _cheap_hold(state):
        for law in CHEAP:
            law(state)
        raise LawBroken("S1", "the quick form of the cheap laws sees what none of them does")


def _cheap_hold(state: State) -> bool:
    """Whether all of CHEAP hold, at the cost of one pass over the rows."""
    config, flights, counters = state.config, state.flights, state.counters
    return (
        columns.kernels.lawful(state.rows.cells, config.block_size)
        and len(state.rows) <= config.running_max
        and (not flights or _step_holds(config, flights[-1]))
        and len(flights) == state.planned - state.committed <= config.pipeline_depth
        and all(flight.step == state.committed + at for at, flight in enumerate(flights))
        and state.next_id == counters.finished + counters.aborted + len(state.requests)
    )


def _step_holds(config: SchedulerConfig, flight: Flight) -> bool:
    """S1 of the newest step."""
    total, smallest, largest, samples = columns.kernels.bounds(flight.entries, flight.samples)
    return (
        total == flight.tokens <= config.batch_tokens_max
        and smallest >= 1
        and (not config.prefill_threshold or largest <= config.prefill_threshold)
        and (config.chunked_prefill or samples == len(flight.samples))
    )


def _tables(state: State) -> np.ndarray:
    """Pages that all rows hold, one table after the other (int32[n])."""
    config, rows = state.config, state.rows
    whole = _ranges(state.tables, rows.table_at, rows.blocks * config.group_count)
    return whole[held_entries(config, rows.computed, rows.blocks)] if config.windows else whole


def _ranges(values: Extents, at: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The values of several ranges, one after the other (int32[sum of counts]); quick where ranges are few."""
    data = values.arena.data
    return np.concatenate([data[:0], *(data[first : first + count] for first, count in zip(at.tolist(), counts.tolist()))])


def _hold(condition: bool, law: str, message: str) -> None:
    if not condition:
        raise LawBroken(law, message)


def free_and_held_are_all(state: State) -> None:
    """M1: free + held = total and no block is queued twice."""
    pool = state.pool
    queued, total = free_blocks(pool).tolist(), pool.block_count
    held = int(np.count_nonzero(pool.ref > 0))
    _hold(len(queued) == pool.free, "M1", f"{len(queued)} blocks queued, {pool.free} counted as free")
    _hold(len(set(queued)) == len(queued), "M1", "a block is queued twice")
    kept = pool.names.count(queued)
    _hold(kept == pool.kept, "M1", f"{kept} free blocks have a name, {pool.kept} are counted as kept")
    _hold(held + len(queued) == total, "M1", f"{held} held and {len(queued)} free of {total}")


def holders_are_counted(state: State) -> None:
    """M2: a block's holders are its occurrences in the block tables; by its form (Pool.status) it is free iff it has none."""
    pool, blocks = state.pool, _tables(state)
    there = len(blocks) == 0 or (int(blocks.min()) >= 0 and int(blocks.max()) < pool.block_count)
    _hold(there, "M2", f"a table has a block that is none of the {pool.block_count}")
    wrong = (np.bincount(blocks, minlength=pool.block_count) != pool.ref).nonzero()[0]
    _hold(len(wrong) == 0, "M2", f"holders of blocks {wrong[:8].tolist()} are not their occurrences in tables")


def writers_are_exclusive(state: State) -> None:
    """M3: a place written by the newest step belongs to one scheduled row, in a block no other row writes."""
    if not state.flights:
        return
    flight, rows, size, groups = state.flights[-1], state.rows, state.config.block_size, state.config.group_count
    row_of = {id_: row for row, id_ in enumerate(rows.id.tolist())}
    table_at, data, written = rows.table_at.tolist(), state.tables.arena.data, []
    for id_, start, count in zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist()):
        if id_ in row_of:
            at = table_at[row_of[id_]]
            written += data[at + start // size * groups : at - (-(start + count) // size * groups)].tolist()
    if len(set(written)) < len(written):
        twice = next(block for block in written if written.count(block) > 1)
        raise LawBroken("M3", f"block {twice} is written by two requests in step {flight.step}")


def capacity_covers(state: State) -> None:
    """M4: blocks cover what is computed, and not a block more."""
    rows, size = state.rows, state.config.block_size
    _hold(bool((rows.blocks == -(-rows.computed // size)).all()), "M4", "a row holds too few or too many blocks")


def queue_is_sorted_and_distinct(state: State) -> None:
    """M5, Y3: a request is in the queue, at its place, or in the batch, once; together they are all that live."""
    queued, running = [entry.id for entry in state.waiting], state.rows.id.tolist()
    _hold(queued == sorted(queued), "M5", "the queue is not in order of arrival")
    live = set(queued) | set(running)
    _hold(len(live) == len(queued) + len(running), "M5", "a request waits twice or waits and runs")
    _hold(len(live) == len(state.requests), "Y3", f"{len(live)} requests live, {len(state.requests)} remembered")


def bounds_hold(state: State) -> None:
    """S1: tokens per step, rows, chunks. Of the steps in flight the newest is looked at: the others were it once."""
    config = state.config
    _hold(len(state.rows) <= config.running_max, "S1", f"{len(state.rows)} rows")
    if not state.flights:
        return
    flight = state.flights[-1]
    total = int(flight.counts.sum())
    _hold(total <= config.batch_tokens_max, "S1", f"step {flight.step} is over the token budget")
    _hold(total == flight.tokens, "S1", f"step {flight.step} has {total} tokens and counts {flight.tokens}")
    _hold(len(flight.counts) > 0 and int(flight.counts.min()) >= 1, "S1", f"step {flight.step} has an empty chunk")
    if config.prefill_threshold:
        _hold(int(flight.counts.max()) <= config.prefill_threshold, "S1", f"step {flight.step} has a chunk over the threshold")
    _hold(config.chunked_prefill or bool(flight.samples.all()), "S1", f"step {flight.step} computes a part of a prompt")


def progress_is_ordered(state: State) -> None:
    """S2: sealed <= computed <= known + pending, and nothing beyond the limit."""
    rows, size = state.rows, state.config.block_size
    ahead = rows.computed > rows.known + rows.pending
    early = rows.sealed * size > np.minimum(rows.computed, rows.known)
    ended = rows.known >= rows.limit
    if not (ahead | early | ended).any():
        return
    _hold(not ahead.any(), "S2", "a row computed more than it knows")
    _hold(not early.any(), "S2", "a row sealed too much")
    _hold(not ended.any(), "S2", "a row is at its limit and still runs")


def full_blocks_are_sealed(state: State) -> None:
    """P1: a row has sealed its full blocks, whose tokens are all known and computed, and none of its other blocks has a name."""
    rows, names = state.rows, state.pool.names
    if not state.config.prefix_caching or len(rows) == 0:
        return
    full = np.minimum(rows.computed, rows.known) // state.config.block_size
    _hold(bool((rows.sealed == full).all()), "P1", f"rows have sealed {rows.sealed.tolist()} of {full.tolist()} full blocks")
    if len(names) == 0:
        return
    for block in _unfinished(state, full).tolist():
        _hold(names.key_of(block) is None, "P1", f"block {block} has a name and is not complete")


def _unfinished(state: State, full: np.ndarray) -> np.ndarray:
    """Pages that the rows hold behind their `full` blocks (int64[R] -> int32[n])."""
    rows, groups = state.rows, state.config.group_count
    if not state.config.windows:
        return _ranges(state.tables, rows.table_at + full, rows.blocks - full)
    first = np.maximum(first_kept(state.config, rows.computed), full[:, None])
    parts = [
        row_table(state, row)[begin * groups + group :: groups]
        for row, begins in enumerate(first.tolist())
        for group, begin in enumerate(begins)
    ]
    return np.concatenate(parts)


def placeholders_match(state: State) -> None:
    """A2: a row's pending tokens are the samples that steps in flight owe this epoch of it."""
    owed: dict[tuple[int, int], int] = {}
    for flight in state.flights:
        for pair in zip(flight.ids[flight.samples].tolist(), flight.epochs[flight.samples].tolist()):
            owed[pair] = owed.get(pair, 0) + 1
    rows = state.rows
    for id_, epoch, pending in zip(rows.id.tolist(), rows.epoch.tolist(), rows.pending.tolist()):
        if pending != owed.get((id_, epoch), 0):
            raise LawBroken("A2", f"request {id_} has {pending} placeholders where {owed.get((id_, epoch), 0)} tokens are due")


def names_are_mutual(state: State) -> None:
    """P1: the two sides of the prefix table are one table."""
    blocks, keys = state.pool.names.blocks(), state.pool.names.keys()
    named = {key: block for block, key in enumerate(keys) if key is not None}
    for key, block in (*blocks.items(), *named.items()):
        if keys[block] != key or blocks.get(key) != block:
            raise LawBroken("P1", f"block {block} is known by another name")


def sums_are_kept(state: State) -> None:
    """Y1: the sums by which a digest knows block tables, holders and free blocks are those of what they stand for."""
    pool, rows = state.pool, state.rows
    _hold(pool.status.sum == columns.kernels.mixed(pool.status.values()), "Y1", "the sum of the blocks' status is another")
    for row, kept in enumerate(rows.table_sum.tolist()):
        table = row_table(state, row).astype(np.int64)
        _hold(columns.kernels.mixed(table) == kept & WORD, "Y1", f"the sum of row {row}'s block table is another")


def queue_sum_is_kept(state: State) -> None:
    """Y1: the sum by which a digest knows the queue is the queue's."""
    _hold(state.waiting_sum == sum_of(state.waiting), "Y1", "the sum of the waiting queue is another")


def steps_are_in_order(state: State) -> None:
    """A3: steps in flight are exactly [committed, planned), within the pipeline's depth."""
    steps = [flight.step for flight in state.flights]
    _hold(steps == list(range(state.committed, state.planned)), "A3", f"steps in flight are {steps}")
    _hold(len(steps) <= state.config.pipeline_depth, "A3", f"{len(steps)} steps in flight")


def histories_begin_with_prompts(state: State) -> None:
    """S2: a row's known tokens begin with its prompt."""
    rows = state.rows
    if len(rows) == 0:
        return
    begins = _ranges(state.tokens, rows.tokens_at, rows.prompt).tobytes()
    prompts = [state.requests[id_].prompt for id_ in rows.id.tolist()]
    if begins == b"".join(prompts):
        return
    for id_, at, prompt in zip(rows.id.tolist(), rows.tokens_at.tolist(), prompts):
        found = extents.read(state.tokens, at, len(prompt) // 4).tobytes()
        _hold(found == prompt, "S2", f"request {id_} lost its prompt")
    raise LawBroken("S2", "a row's prompt has another length than its request's")


def arrivals_are_accounted(state: State) -> None:
    """Y3: arrived = finished + aborted + live."""
    ended = state.counters.finished + state.counters.aborted
    _hold(state.next_id == ended + len(state.requests), "Y3", f"{state.next_id} arrived, {ended} ended, {len(state.requests)} live")


ALL = (
    bounds_hold, progress_is_ordered, capacity_covers, steps_are_in_order, arrivals_are_accounted, free_and_held_are_all,
    holders_are_counted, sums_are_kept, writers_are_exclusive, queue_sum_is_kept, queue_is_sorted_and_distinct,
    full_blocks_are_sealed, placeholders_match, names_are_mutual, histories_begin_with_prompts,
)  # fmt: skip
CHEAP = (bounds_hold, progress_is_ordered, capacity_covers, steps_are_in_order, arrivals_are_accounted)
