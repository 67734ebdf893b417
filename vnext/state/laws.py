"""Laws: what must hold in every state, each a small function named after its entry in docs/laws.md.

`check_cheap` is a few array sums and always on in the engine; `check` is everything and on in tests, in the simulator and
in `vnext-replay verify --laws`. A broken law is a bug of the engine, never of a client.
"""

from __future__ import annotations

import numpy as np

from vnext.state.errors import LawBroken
from vnext.state.order import waiting_key
from vnext.state.planning import row_blocks, row_tokens
from vnext.state.pool import HELD, free_blocks
from vnext.state.state import State, blocks_for


def check(state: State) -> None:
    """All laws of one state. Raises LawBroken."""
    for law in ALL:
        law(state)


def check_cheap(state: State) -> None:
    """The laws that cost a few microseconds. Raises LawBroken."""
    for law in CHEAP:
        law(state)


def _hold(condition: bool, law: str, message: str) -> None:
    if not condition:
        raise LawBroken(law, message)


def free_and_held_are_all(state: State) -> None:
    """M1: free + held = total and no block is queued twice."""
    queued = free_blocks(state.pool)
    held = int((state.pool.ref > 0).sum())
    _hold(len(queued) == state.pool.free, "M1", f"{len(queued)} blocks queued, {state.pool.free} counted as free")
    _hold(len(np.unique(queued)) == len(queued), "M1", "a block is queued twice")
    _hold(held + len(queued) == len(state.pool.ref), "M1", f"{held} held and {len(queued)} free of {len(state.pool.ref)}")


def holders_are_counted(state: State) -> None:
    """M2: a block's holders are its occurrences in the block tables; it is free iff it has none."""
    counted = np.zeros(len(state.pool.ref), dtype=np.int64)
    for row in range(len(state.rows)):
        np.add.at(counted, row_blocks(state, row), 1)
    wrong = np.flatnonzero(counted != state.pool.ref)
    _hold(len(wrong) == 0, "M2", f"holders of blocks {wrong[:8].tolist()} are not their occurrences in tables")
    _hold(bool(((state.pool.ref == 0) == (state.pool.place != HELD)).all()), "M2", "a block without holder is not free")


def writers_are_exclusive(state: State) -> None:
    """M3: a place written by the newest step belongs to one scheduled row, in a block no other row writes."""
    if not state.flights:
        return
    flight, size, written = state.flights[-1], state.config.block_size, set()
    rows = {int(id_): row for row, id_ in enumerate(state.rows.id)}
    for id_, start, count in zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist()):
        if id_ not in rows:
            continue
        blocks = row_blocks(state, rows[id_])[start // size : blocks_for(start + count, size)].tolist()
        _hold(written.isdisjoint(blocks), "M3", f"request {id_} writes a block that another row writes")
        written.update(blocks)


def capacity_covers(state: State) -> None:
    """M4: blocks cover what is computed, and not a block more."""
    rows, size = state.rows, state.config.block_size
    _hold(bool((rows.blocks == -(-rows.computed // size)).all()), "M4", "a row holds too few or too many blocks")


def queue_is_sorted_and_distinct(state: State) -> None:
    """M5, Y3: a request is in the queue, at its place, or in the batch, once; together they are all that live."""
    keys = [waiting_key(state.config, entry) for entry in state.waiting]
    _hold(keys == sorted(keys), "M5", "the queue is not in the policy's order")
    queued, running = [entry.id for entry in state.waiting], state.rows.id.tolist()
    live = set(queued) | set(running)
    _hold(len(live) == len(queued) + len(running), "M5", "a request waits twice or waits and runs")
    _hold(len(live) == len(state.requests), "Y3", f"{len(live)} requests live, {len(state.requests)} remembered")


def bounds_hold(state: State) -> None:
    """S1: tokens per step, rows, chunks."""
    config = state.config
    _hold(len(state.rows) <= config.running_max, "S1", f"{len(state.rows)} rows")
    for flight in state.flights:
        _hold(int(flight.counts.sum()) <= config.batch_tokens_max, "S1", f"step {flight.step} is over the token budget")
        _hold(len(flight.counts) > 0 and int(flight.counts.min()) >= 1, "S1", f"step {flight.step} has an empty chunk")


def progress_is_ordered(state: State) -> None:
    """S2: sealed <= computed <= known + pending, and nothing beyond the limit."""
    rows, size = state.rows, state.config.block_size
    wrongs = {
        "a row computed more than it knows": rows.computed > rows.known + rows.pending,
        "a row sealed too much": rows.sealed * size > np.minimum(rows.computed, rows.known),
        "a row is at its limit and still runs": rows.known >= rows.limit,
    }
    for message, wrong in wrongs.items():
        _hold(not wrong.any(), "S2", message)


def placeholders_match(state: State) -> None:
    """A2: a row's pending tokens are the samples that steps in flight owe this epoch of it."""
    owed: dict[tuple[int, int], int] = {}
    for flight in state.flights:
        for id_, epoch, samples in zip(flight.ids.tolist(), flight.epochs.tolist(), flight.samples.tolist()):
            owed[id_, epoch] = owed.get((id_, epoch), 0) + samples
    for id_, epoch, pending in zip(state.rows.id.tolist(), state.rows.epoch.tolist(), state.rows.pending.tolist()):
        _hold(pending == owed.get((id_, epoch), 0), "A2", f"request {id_} has {pending} placeholders")


def names_are_mutual(state: State) -> None:
    """P1: the two sides of the prefix table are one table."""
    pool = state.pool
    _hold(len(pool.names) == len(pool.named), "P1", f"{len(pool.names)} names for {len(pool.named)} blocks")
    for key, block in pool.names.items():
        _hold(pool.named.get(block) == key, "P1", f"block {block} is known by another name")


def steps_are_in_order(state: State) -> None:
    """A3: steps in flight are exactly [committed, planned), within the pipeline's depth."""
    steps = [flight.step for flight in state.flights]
    _hold(steps == list(range(state.committed, state.planned)), "A3", f"steps in flight are {steps}")
    _hold(len(steps) <= state.config.pipeline_depth, "A3", f"{len(steps)} steps in flight")


def histories_begin_with_prompts(state: State) -> None:
    """S2: a row's known tokens begin with its prompt."""
    for row, id_ in enumerate(state.rows.id.tolist()):
        prompt = state.requests[id_].prompt
        _hold(row_tokens(state, row)[: len(prompt) // 4].tobytes() == prompt, "S2", f"request {id_} lost its prompt")


def arrivals_are_accounted(state: State) -> None:
    """Y3: arrived = finished + aborted + live."""
    ended = state.counters.finished + state.counters.aborted
    _hold(state.next_id == ended + len(state.requests), "Y3", f"{state.next_id} arrived, {ended} ended, {len(state.requests)} live")


CHEAP = (bounds_hold, progress_is_ordered, capacity_covers, steps_are_in_order, arrivals_are_accounted)
ALL = (
    *CHEAP,
    free_and_held_are_all,
    holders_are_counted,
    writers_are_exclusive,
    queue_is_sorted_and_distinct,
    placeholders_match,
    names_are_mutual,
    histories_begin_with_prompts,
)
