"""Fold StepCommitted: sampled tokens become known, full blocks are sealed, finished requests leave.

What a step sampled for a request that was preempted, aborted or finished meanwhile is dropped by its epoch, never by
counting: the state knows which steps are in flight and what each of them asked for.
"""

from __future__ import annotations

import msgspec
import numpy as np
import xxhash

from vnext.state import extents, rows as columns
from vnext.state.errors import require
from vnext.state.events import StepCommitted, unpack_tokens
from vnext.state.lifecycle import Change, Status, after
from vnext.state.planning import move_tokens, release_row, seal, without_rows
from vnext.state.rows import Rows, find_rows
from vnext.state.state import State

replace = msgspec.structs.replace


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """Which row takes which token (int64[n], int32[n], place in the step's samples int64[n]) and who is done (bool[n])."""

    rows: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    stopped: np.ndarray
    at_limit: np.ndarray


def settle(state: State, event: StepCommitted) -> Settled:
    """Match the oldest step's samples with the rows that are still of their epoch."""
    require(bool(state.flights), f"step {event.step} committed with no step in flight")
    require(len(event.tokens) % 4 == 0, f"step {event.step} committed with {len(event.tokens)} bytes: not int32 tokens")
    flight, sampled = state.flights[0], unpack_tokens(event.tokens)
    require(event.step == flight.step, f"step {event.step} committed where step {flight.step} is due")
    asked = flight.samples.nonzero()[0]
    require(len(sampled) == len(asked), f"step {event.step} sampled {len(sampled)} tokens where {len(asked)} were asked for")
    require(len(sampled) == 0 or int(sampled.min()) >= 0, f"step {event.step} sampled a negative token id")
    found = find_rows(state.rows, flight.ids[asked], flight.epochs[asked])
    alive = (found >= 0).nonzero()[0]
    rows, tokens = found[alive], sampled[alive]
    return Settled(
        rows=rows,
        tokens=tokens,
        samples=alive,
        stopped=_stops(state, rows, tokens),
        at_limit=state.rows.known[rows] + 1 >= state.rows.limit[rows],
    )


def _stops(state: State, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether each token ends its request: the model's end tokens unless ignored, the request's own stop tokens."""
    flags = state.rows.cells[columns.FLAGS, rows]
    stops = np.zeros(len(rows), dtype=bool)
    for eos in state.config.eos_token_ids:
        stops |= tokens == eos
    stops &= (flags & columns.IGNORE_EOS) == 0
    for place in (flags & columns.OWN_STOPS).nonzero()[0].tolist():
        request = state.requests[int(state.rows.id[rows[place]])]
        stops[place] |= int(tokens[place]) in request.sampling.stop_token_ids
    return stops & (state.rows.known[rows] + 1 > state.rows.cells[columns.MIN_KNOWN, rows])


def fold_step_committed(state: State, event: StepCommitted, settled: Settled | None = None) -> State:
    """The state with one step less in flight. IllegalEvent if it is not the oldest step's result.

    `settled` is what `settle(state, event)` gave, for a caller that has asked already.
    """
    settled = settled or settle(state, event)
    done = settled.rows[settled.stopped | settled.at_limit]
    state = _take_tokens(_with_places(state, settled), settled)
    state = replace(
        seal(state, ended=done),
        flights=state.flights[1:],
        committed=state.committed + 1,
        token_digest=xxhash.xxh3_64_intdigest(event.tokens, seed=state.token_digest),
    )
    return finish(state, done.tolist(), Change.FINISH) if len(done) else state


def _with_places(state: State, settled: Settled) -> State:
    """Histories that have a place for one token more; a full one doubles (rarely: see admitting.TOKENS_SPARE)."""
    rows = state.rows
    sizes = rows.cells[columns.TOKENS_SIZE]
    full = settled.rows[rows.known[settled.rows] >= sizes[settled.rows]]
    if len(full) == 0:
        return state
    sizes = sizes.copy()
    sizes[full] = np.minimum(2 * sizes[full], rows.limit[full])
    return move_tokens(state, sizes, 0)


def _take_tokens(state: State, settled: Settled) -> State:
    rows = state.rows
    cells = rows.cells.copy()
    places = rows.tokens_at[settled.rows] + rows.known[settled.rows]
    cells[columns.KNOWN, settled.rows] += 1
    cells[columns.PENDING, settled.rows] -= 1
    counters = state.counters
    return replace(
        state,
        rows=Rows(cells),
        tokens=extents.write(state.tokens, places, settled.tokens),
        counters=replace(counters, generated_tokens=counters.generated_tokens + len(settled.rows)),
    )


def finish(state: State, gone: list[int], change: Change) -> State:
    """These rows leave: blocks last first, row and request forgotten."""
    pool = state.pool
    for row in gone:
        after(Status.RUNNING, change)
        pool = release_row(state, pool, row)
    ids = state.rows.id[gone].tolist()
    return replace(
        state, pool=pool, rows=without_rows(state.rows, gone), requests=state.requests.without(ids),
        counters=count_ended(state, len(gone), change),
    )


def count_ended(state: State, count: int, change: Change):
    counters = state.counters
    if change is Change.FINISH:
        return replace(counters, finished=counters.finished + count)
    return replace(counters, aborted=counters.aborted + count)
