"""Fold StepCommitted: sampled tokens become known, full blocks are sealed, finished requests leave.

What a step sampled for a request that was preempted, aborted or finished meanwhile is dropped by its epoch, never by
counting: the state knows which steps are in flight and what each of them asked for.
"""

from __future__ import annotations

import msgspec
import numpy as np
import xxhash

from vnext.state import columns as column_forms, extents, rows as columns
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import StepCommitted, unpack_tokens
from vnext.state.lifecycle import Change, Status, after
from vnext.state.planning import NO_ROWS, move_tokens, release_row, seal, without_rows
from vnext.state.rows import Rows, find_rows
from vnext.state.state import State

replace = msgspec.structs.replace


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """Which row takes which token (int64[n], int32[n], place in the step's samples int64[n]) and who is done (bool[n]):
    `ended` of them."""

    rows: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    stopped: np.ndarray
    at_limit: np.ndarray
    ended: int


def settle(state: State, event: StepCommitted) -> Settled:
    """Match the oldest step's samples with the rows that are still of their epoch."""
    if not state.flights:
        raise IllegalEvent(f"step {event.step} committed with no step in flight")
    if event.step != state.flights[0].step:
        raise IllegalEvent(f"step {event.step} committed where step {state.flights[0].step} is due")
    if len(event.tokens) % 4:
        raise IllegalEvent(f"step {event.step} committed with {len(event.tokens)} bytes: not int32 tokens")
    sampled = unpack_tokens(event.tokens)
    return _settle_in_place(state, sampled) or _settle_one_by_one(state, sampled)


def _settle_in_place(state: State, sampled: np.ndarray) -> Settled | None:
    """The usual case: the step's requests are still the first rows. None if they are not."""
    flight, count = state.flights[0], len(sampled)
    places, ends = np.empty((2, count), dtype=np.int64), np.empty((2, count), dtype=bool)
    eos = np.array(state.config.eos_token_ids, dtype=np.int64)
    found = column_forms.kernels.settle(
        state.rows.cells, flight.entries, flight.samples, sampled, eos, places, ends
    )
    if found is None:
        return None
    (rows, samples), (stopped, at_limit), (own_stops, ended) = places, ends, found
    if own_stops:
        stopped |= _own_stops(state, rows, sampled)
        ended = int(np.count_nonzero(stopped | at_limit))
    return Settled(rows=rows, tokens=sampled, samples=samples, stopped=stopped, at_limit=at_limit, ended=ended)


def _settle_one_by_one(state: State, sampled: np.ndarray) -> Settled:
    """The general case: some requests have left, or come back in a new epoch."""
    flight = state.flights[0]
    asked, step = flight.samples.nonzero()[0], flight.step
    require(len(sampled) == len(asked), f"step {step} sampled {len(sampled)} tokens where {len(asked)} were asked for")
    require(len(sampled) == 0 or int(sampled.min()) >= 0, f"step {step} sampled a negative token id")
    found = find_rows(state.rows, flight.ids[asked], flight.epochs[asked])
    alive = (found >= 0).nonzero()[0]
    rows, tokens = found[alive], sampled[alive]
    stopped = _ends(state, rows, tokens) | _own_stops(state, rows, tokens)
    at_limit = state.rows.known[rows] + 1 >= state.rows.limit[rows]
    ended = int(np.count_nonzero(stopped | at_limit))
    return Settled(rows=rows, tokens=tokens, samples=alive, stopped=stopped, at_limit=at_limit, ended=ended)


def _ends(state: State, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether each token is one of the model's end tokens, not ignored and not too early (bool[n])."""
    cells, ids = state.rows.cells, state.config.eos_token_ids
    if not ids:
        return np.zeros(len(rows), dtype=bool)
    heeded = (cells[columns.FLAGS, rows] & columns.IGNORE_EOS) == 0
    late = cells[columns.KNOWN, rows] + 1 > cells[columns.MIN_KNOWN, rows]
    return (tokens[:, None] == np.array(ids)).any(axis=1) & heeded & late  # np.isin costs ten times as much for a few


def _own_stops(state: State, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Whether each token is one of its request's own stop tokens and not too early (bool[n])."""
    cells = state.rows.cells
    stops = np.zeros(len(rows), dtype=bool)
    for place in (cells[columns.FLAGS, rows] & columns.OWN_STOPS).nonzero()[0].tolist():
        row = rows[place]
        request = state.requests[int(cells[columns.ID, row])]
        late = cells[columns.KNOWN, row] + 1 > cells[columns.MIN_KNOWN, row]
        stops[place] = late and int(tokens[place]) in request.sampling.stop_token_ids
    return stops


def fold_step_committed(state: State, event: StepCommitted, settled: Settled | None = None) -> State:
    """The state with one step less in flight. IllegalEvent if it is not the oldest step's result.

    `settled` is what `settle(state, event)` gave, for a caller that has asked already.
    """
    settled = settled or settle(state, event)
    done = np.sort(settled.rows[settled.stopped | settled.at_limit]) if settled.ended else NO_ROWS
    state = _take_tokens(state, settled)
    state = replace(
        state,
        pool=seal(state, done, given_back=True),
        flights=state.flights[1:],
        committed=state.committed + 1,
        token_digest=xxhash.xxh3_64_intdigest(event.tokens, seed=state.token_digest),
    )
    return finish(state, done.tolist(), Change.FINISH) if len(done) else state


def _take_tokens(state: State, settled: Settled) -> State:
    rows, tokens = state.rows, extents.own(state.tokens)
    cells = np.empty_like(rows.cells)
    if not column_forms.kernels.take_tokens(rows.cells, cells, settled.rows, settled.tokens, tokens.arena.data):
        return _take_tokens(_with_places(replace(state, tokens=tokens), settled), settled)
    counters = state.counters
    return replace(
        state,
        rows=Rows(cells),
        tokens=tokens,
        counters=replace(counters, generated_tokens=counters.generated_tokens + len(settled.rows)),
    )


def _with_places(state: State, settled: Settled) -> State:
    """Full histories move to extents twice as large (rarely: see admitting.TOKENS_SPARE)."""
    rows = state.rows
    sizes = rows.cells[columns.TOKENS_SIZE]
    full = settled.rows[rows.known[settled.rows] >= sizes[settled.rows]]
    return move_tokens(state, full, np.minimum(2 * sizes[full], rows.limit[full]))


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
