"""Quick forms of the laws of one state, for the tiny states of the simulator: each says whether its law holds.

The laws themselves are in vnext/state/laws.py: those speak where a quick form says no, and the two must agree. Only laws
whose parts an event touched are asked: states share what an event left alone, and what a state holds is never written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np

from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.snapshot import Snapshot
from vnext.state import columns, laws
from vnext.state.order import sum_of
from vnext.state.rows import TABLE_SUM, TOKENS_AT

ROWS, TABLES, TOKENS, FLIGHTS, POOL, WAITING, REQUESTS, COUNTERS, NUMBERS = (1 << place for place in range(9))
"""Parts of a state, as bits."""
MIXED = columns.kernels.mixed
"""As it is built here, whatever form the engine is in: an engine in its plain form is held to the compiled sums too."""


def check_after(before: Snapshot, after: Snapshot) -> None:
    """Every law of the state after one event, as `laws.check`; the state before it was checked. Raises LawBroken."""
    parts = touched(before, after)
    for reads, holds, law in QUICK:
        if reads & parts and not holds(after):
            law(after.state)
            raise Divergence(f"{law.__name__} holds, and its quick form says that it does not")


def touched(before: Snapshot, after: Snapshot) -> int:
    """The parts that are not the same objects."""
    old, new = before.state, after.state
    return (
        ROWS * (old.rows is not new.rows)
        | TABLES * (old.tables is not new.tables)
        | TOKENS * (old.tokens is not new.tokens)
        | FLIGHTS * (old.flights is not new.flights)
        | POOL * (old.pool is not new.pool)
        | WAITING * (old.waiting is not new.waiting or old.waiting_sum != new.waiting_sum)
        | REQUESTS * (old.requests is not new.requests)
        | COUNTERS * (old.counters is not new.counters)
        | NUMBERS * ((old.next_id, old.planned, old.committed) != (new.next_id, new.planned, new.committed))
    )


def free_and_held_are_all(seen: Snapshot) -> bool:
    queued, pool = seen.queued, seen.state.pool
    counted = len(queued) == len(set(queued)) == pool.free == seen.holders.count(0)
    return counted and pool.names.count(queued) == pool.kept


def holders_are_counted(seen: Snapshot) -> bool:
    counts, total = [0] * len(seen.holders), len(seen.holders)
    for block in chain.from_iterable(seen.held):
        if not 0 <= block < total:
            return False
        counts[block] += 1
    return counts == seen.holders


def sums_are_kept(seen: Snapshot) -> bool:
    status = seen.state.pool.status
    if status.sum != MIXED(status.values()):
        return False
    sums = [MIXED(np.array(table, dtype=np.int64)) for table in seen.tables]
    return sums == [kept & laws.WORD for kept in seen.cells[TABLE_SUM]]


def writers_are_exclusive(seen: Snapshot) -> bool:
    if not seen.flights:
        return True
    step, size, written, groups = seen.flights[-1], seen.state.config.block_size, [], seen.state.config.group_count
    table_of = dict(zip(seen.id, seen.tables))
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        if id_ in table_of:
            table, last = table_of[id_], -(-(start + count) // size)
            if start < 0 or last * groups > len(table):
                return False  # what it writes there belongs to nobody, or to somebody else
            written += table[start // size * groups : last * groups]
    return len(set(written)) == len(written)


def capacity_covers(seen: Snapshot) -> bool:
    size = seen.state.config.block_size
    return seen.blocks == [-(-computed // size) for computed in seen.computed]


def queue_sum_is_kept(seen: Snapshot) -> bool:
    return seen.state.waiting_sum == sum_of(seen.state.waiting)


def queue_is_sorted_and_distinct(seen: Snapshot) -> bool:
    queued = [entry.id for entry in seen.state.waiting]
    live = {*queued, *seen.id}
    return queued == sorted(queued) and len(live) == len(queued) + len(seen.id) == len(seen.state.requests)


def bounds_hold(seen: Snapshot) -> bool:
    config = seen.state.config
    if len(seen.id) > config.running_max:
        return False
    if not seen.flights:
        return True
    step = seen.flights[-1]
    most = config.prefill_threshold or config.batch_tokens_max
    total = sum(step.counts)
    fits = bool(step.counts) and total <= config.batch_tokens_max and total == seen.state.flights[-1].tokens
    return fits and min(step.counts) >= 1 and max(step.counts) <= most and (config.chunked_prefill or all(step.samples))


def progress_is_ordered(seen: Snapshot) -> bool:
    size = seen.state.config.block_size
    for computed, known, pending, sealed, limit in zip(seen.computed, seen.known, seen.pending, seen.sealed, seen.limit):
        if computed > known + pending or sealed * size > computed or sealed * size > known or known >= limit:
            return False
    return True


def full_blocks_are_sealed(seen: Snapshot) -> bool:
    config = seen.state.config
    if not config.prefix_caching:
        return True
    names, size, groups = seen.state.pool.names, config.block_size, config.group_count
    for computed, known, sealed, table, held in zip(seen.computed, seen.known, seen.sealed, seen.tables, seen.held):
        if sealed != min(computed, known) // size:
            return False
        for block in table[sealed * groups :] if len(names) else ():
            if names.key_of(block) is not None and (held is table or block in held):
                return False
    return True


def placeholders_match(seen: Snapshot) -> bool:
    owed: dict[tuple[int, int], int] = {}
    for step in seen.flights:
        for pair in step.owed:
            owed[pair] = owed.get(pair, 0) + 1
    for pair, pending in zip(zip(seen.id, seen.epoch), seen.pending):
        if pending != owed.get(pair, 0):
            return False
    return True


def names_are_mutual(seen: Snapshot) -> bool:
    names = seen.state.pool.names
    return names.blocks() == {key: block for block, key in enumerate(names.keys()) if key is not None}


def steps_are_in_order(seen: Snapshot) -> bool:
    state = seen.state
    steps = [step.step for step in seen.flights]
    return steps == list(range(state.committed, state.planned)) and len(steps) <= state.config.pipeline_depth


def histories_begin_with_prompts(seen: Snapshot) -> bool:
    data, requests = seen.state.tokens.arena.data, seen.state.requests.mapping()
    for id_, at, count in zip(seen.id, seen.cells[TOKENS_AT], seen.prompt):
        if data[at : at + count].tobytes() != requests[id_].prompt:
            return False
    return True


def arrivals_are_accounted(seen: Snapshot) -> bool:
    state, counters = seen.state, seen.state.counters
    return state.next_id == counters.finished + counters.aborted + len(state.requests)


Form = Callable[[Snapshot], bool]
QUICK: tuple[tuple[int, Form, Callable], ...] = (
    (ROWS | FLIGHTS, bounds_hold, laws.bounds_hold),
    (ROWS, progress_is_ordered, laws.progress_is_ordered),
    (ROWS, capacity_covers, laws.capacity_covers),
    (FLIGHTS | NUMBERS, steps_are_in_order, laws.steps_are_in_order),
    (COUNTERS | REQUESTS | NUMBERS, arrivals_are_accounted, laws.arrivals_are_accounted),
    (POOL, free_and_held_are_all, laws.free_and_held_are_all),
    (POOL | ROWS | TABLES, holders_are_counted, laws.holders_are_counted),
    (POOL | ROWS | TABLES, sums_are_kept, laws.sums_are_kept),
    (FLIGHTS | ROWS | TABLES, writers_are_exclusive, laws.writers_are_exclusive),
    (WAITING, queue_sum_is_kept, laws.queue_sum_is_kept),
    (WAITING | ROWS | REQUESTS, queue_is_sorted_and_distinct, laws.queue_is_sorted_and_distinct),
    (ROWS | TABLES | POOL, full_blocks_are_sealed, laws.full_blocks_are_sealed),
    (FLIGHTS | ROWS, placeholders_match, laws.placeholders_match),
    (POOL, names_are_mutual, laws.names_are_mutual),
    (ROWS | TOKENS | REQUESTS, histories_begin_with_prompts, laws.histories_begin_with_prompts),
)
"""(parts that the law reads, its quick form, the law)."""
