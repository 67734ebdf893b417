"""Fold StepCommitted: sampled tokens become known, full blocks are hashed, finished requests leave.

Samples of a request that has since been preempted, aborted or finished are dropped. The state recognises them by the
request's id and `preemption_count`, not by counting: it knows which steps are in flight and what each of them samples.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import xxhash

from vnext.state import pool as pools
from vnext.state.block_hash import leading_hashes
from vnext.state.errors import IllegalEvent, require
from vnext.state.events import StepCommitted, unpack_tokens
from vnext.state.fold_drafts import Runs, runs_in_place, runs_of, settle
from vnext.state.fold_plan import NO_ROWS, hash_full_blocks, move_tokens
from vnext.state.pool import longest_prefix
from vnext.state.preempt import release_row, row_tokens
from vnext.state.recurrent import name_snapshots, with_pin, with_pins_of_blocks, with_snapshot
from vnext.state.state import Counters, State, root_of
from vnext.state.store import columns, extents, fields
from vnext.state.store.clients import left_batch
from vnext.state.store.drafts_numpy import places_in_runs, up_to_first
from vnext.state.store.pins import ends_of
from vnext.state.store.rows import Rows, find_rows, without_rows
from vnext.state.windows import NULL, give_back, longest_hit

Ending = Literal["finished", "aborted"]
"""How a request ends; the name of its counter."""

replace = msgspec.structs.replace


class MatchedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Which row takes which token: `rows` int64[n], `tokens` int32[n], `samples` int64[n] (indices of the step's samples).

    `stopped` and `at_limit` (bool[n]) mark requests that end; `ended` counts them. `runs`: of a step with drafts, in which a
    row may take several tokens, one after the other.
    """

    rows: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    stopped: np.ndarray
    at_limit: np.ndarray
    ended: int
    runs: Runs | None = None


Effects = MatchedSamples | None
"""The effects of an event beyond the state. A commit gives tokens to requests; `outputs` derives the clients' news from it."""


def match_samples(state: State, event: StepCommitted) -> MatchedSamples:
    """Match the oldest step's samples with the rows whose `preemption_count` has not changed since."""
    if not state.in_flight:
        raise IllegalEvent(f"step {event.step} committed with no step in flight")
    if event.step != state.in_flight[0].step:
        raise IllegalEvent(f"step {event.step} committed where step {state.in_flight[0].step} is due")
    if len(event.tokens) % 4:
        raise IllegalEvent(f"step {event.step} committed with {len(event.tokens)} bytes: not int32 tokens")
    sampled, drafts = unpack_tokens(event.tokens), state.in_flight[0].drafts
    if drafts is not None and (event.counts or event.drafted or drafts.any()):
        return _match_runs_in_place(state, event, sampled) or _match_runs(state, event, sampled)
    if event.counts or event.drafted:
        raise IllegalEvent(f"step {event.step} has drafts in an engine without speculation")
    return _match_in_place(state, sampled) or _match_one_by_one(state, sampled)


def _match_in_place(state: State, sampled: np.ndarray) -> MatchedSamples | None:
    """The usual case: the step's requests are still the first rows. Returns None if they are not."""
    scheduled, count = state.in_flight[0], len(sampled)
    places, ends = np.empty((2, count), dtype=np.int64), np.empty((2, count), dtype=bool)
    eos = np.array(state.config.eos_token_ids, dtype=np.int64)
    found = columns.impl.match_samples(
        state.rows.cells, scheduled.entries, scheduled.samples, sampled, eos, places, ends
    )
    if found is None:
        return None
    (rows, samples), (stopped, at_limit), (own_stops, ended) = places, ends, found
    if own_stops:
        stopped |= _own_stops(state, rows, sampled, state.rows.known[rows] + 1)
        ended = int(np.count_nonzero(stopped | at_limit))
    return MatchedSamples(rows=rows, tokens=sampled, samples=samples, stopped=stopped, at_limit=at_limit, ended=ended)


def _match_one_by_one(state: State, sampled: np.ndarray) -> MatchedSamples:
    """The general case: some requests have left, or have been preempted and admitted again."""
    scheduled = state.in_flight[0]
    asked, step = scheduled.samples.nonzero()[0], scheduled.step
    require(len(sampled) == len(asked), f"step {step} sampled {len(sampled)} tokens where {len(asked)} were asked for")
    require(len(sampled) == 0 or int(sampled.min()) >= 0, f"step {step} sampled a negative token id")
    found = find_rows(state.rows, scheduled.ids[asked], scheduled.preemption_counts[asked])
    alive = (found >= 0).nonzero()[0]
    rows, tokens = found[alive], sampled[alive]
    known = state.rows.known[rows] + 1
    stopped = _ends(state, rows, tokens, known) | _own_stops(state, rows, tokens, known)
    at_limit = known >= state.rows.limit[rows]
    ended = int(np.count_nonzero(stopped | at_limit))
    return MatchedSamples(rows=rows, tokens=tokens, samples=alive, stopped=stopped, at_limit=at_limit, ended=ended)


def _match_runs_in_place(state: State, event: StepCommitted, sampled: np.ndarray) -> MatchedSamples | None:
    """`_match_in_place` for a step with drafts. Returns None also if a row has stop tokens of its own."""
    scheduled, runs = state.in_flight[0], runs_in_place(state, event)
    places, ends = np.empty((2, len(sampled)), dtype=np.int64), np.empty((2, len(sampled)), dtype=bool)
    step = scheduled.entries, scheduled.samples, sampled, np.array(state.config.eos_token_ids, dtype=np.int64)
    found = columns.impl.match_runs(state.rows.cells, step, (runs.counts, runs.drafted, runs.planned), places, ends)
    if found is None:
        return None
    taken, ended = found
    (rows, samples), (stopped, at_limit) = places[:, :taken], ends[:, :taken]
    tokens = sampled if taken == len(sampled) else sampled[samples]
    return MatchedSamples(
        rows=rows, tokens=tokens, samples=samples, stopped=stopped, at_limit=at_limit, ended=ended, runs=runs
    )


def _match_runs(state: State, event: StepCommitted, sampled: np.ndarray) -> MatchedSamples:
    """The samples of a step with drafts: of each live request, its tokens up to the first that ends it."""
    require(len(sampled) == 0 or int(sampled.min()) >= 0, f"step {event.step} sampled a negative token id")
    runs, run_of = runs_of(state, event)
    samples = (run_of >= 0).nonzero()[0]
    rows, tokens, known = runs.rows[run_of[samples]], sampled[samples], places_in_runs(runs.counts)
    known += state.rows.known[rows] + 1
    stopped = _ends(state, rows, tokens, known) | _own_stops(state, rows, tokens, known)
    at_limit = known >= state.rows.limit[rows]
    taken = up_to_first(stopped | at_limit, runs.counts)
    rows, tokens, samples, stopped, at_limit = (each[taken] for each in (rows, tokens, samples, stopped, at_limit))
    ended = int(np.count_nonzero(stopped | at_limit))
    return MatchedSamples(
        rows=rows, tokens=tokens, samples=samples, stopped=stopped, at_limit=at_limit, ended=ended, runs=runs
    )


def _ends(state: State, rows: np.ndarray, tokens: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each token is one of the model's end tokens, not ignored and not before `min_tokens` (bool[n]).

    `known` int64[n]: the request's tokens up to and including this one.
    """
    cells, ids = state.rows.cells, state.config.eos_token_ids
    if not ids:
        return np.zeros(len(rows), dtype=bool)
    heeded = (cells[fields.FLAGS, rows] & fields.IGNORE_EOS) == 0
    late = known > cells[fields.MIN_KNOWN, rows]
    ends: np.ndarray = (tokens[:, None] == np.array(ids)).any(axis=1) & heeded & late  # np.isin costs ten times as much for few ids
    return ends


def _own_stops(state: State, rows: np.ndarray, tokens: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each token is one of its request's own stop tokens and not before `min_tokens` (bool[n]). `known` as in `_ends`."""
    cells = state.rows.cells
    stops = np.zeros(len(rows), dtype=bool)
    for place in (cells[fields.FLAGS, rows] & fields.OWN_STOPS).nonzero()[0].tolist():
        row = rows[place]
        request = state.requests[int(cells[fields.ID, row])]
        late = known[place] > cells[fields.MIN_KNOWN, row]
        stops[place] = late and int(tokens[place]) in request.sampling.stop_token_ids
    return stops


def fold_step_committed(state: State, event: StepCommitted) -> tuple[State, MatchedSamples]:
    """The state without the oldest step in flight, and the samples matched to rows. IllegalEvent if `event` is not its result."""
    matched = match_samples(state, event)
    done = np.sort(matched.rows[matched.stopped | matched.at_limit]) if matched.ended else NO_ROWS
    before = state.rows
    state = _take_tokens(state, matched)
    if matched.runs is not None:
        state = settle(state, matched.runs, done)
    state = replace(
        state,
        pool=hash_full_blocks(state, done, given_back=True),
        in_flight=state.in_flight[1:],
        committed=state.committed + 1,
        token_digest=xxhash.xxh3_64_intdigest(event.tokens, seed=state.token_digest),
    )
    if matched.runs is not None and state.config.windows:
        state = replace(state, pool=give_back(state, before.computed_at_least))  # drafts that were kept have moved the windows
    if state.rows.recurrent is not None:
        state = name_snapshots(state)
    return finish(state, done.tolist(), "finished") if len(done) else state, matched


def _take_tokens(state: State, matched: MatchedSamples) -> State:
    rows, tokens = state.rows, extents.own(state.tokens)
    cells = np.empty_like(rows.cells)
    if not columns.impl.take_tokens(rows.cells, cells, matched.rows, matched.tokens, tokens.arena.data):
        return _take_tokens(_with_places(replace(state, tokens=tokens), matched), matched)
    counters = state.counters
    return replace(
        state,
        rows=Rows(cells, rows.drafting, rows.recurrent),
        tokens=tokens,
        counters=replace(counters, generated_tokens=counters.generated_tokens + len(matched.rows)),
    )


def _with_places(state: State, matched: MatchedSamples) -> State:
    """Move full histories to extents twice as large or larger. This is rare (see allocate.TOKENS_SPARE)."""
    owners, given = np.unique(matched.rows, return_counts=True)
    sizes, wanted = state.rows.cells[fields.TOKENS_SIZE, owners], state.rows.known[owners] + given
    full, sizes = owners[wanted > sizes], np.maximum(2 * sizes, wanted)[wanted > sizes]
    return move_tokens(state, full, np.minimum(sizes, state.rows.limit[full]))


def finish(state: State, gone: list[int], ending: Ending) -> State:
    """Remove these rows and forget their requests; their blocks are released last first, but for those that are pinned."""
    pool, ids = state.pool, state.rows.id[gone].tolist()
    for row, id_ in zip(gone, ids):
        if state.requests[id_].sampling.retention and state.config.pinned_pages_max:
            pool = with_pins_of_blocks(state.config, _pinned(state, pool, row), "displaced")
    for row in gone:
        pool = release_row(state, pool, row)
    return replace(
        state, pool=pool, rows=without_rows(state.rows, gone), requests=state.requests.without(ids),
        counters=count_ended(state, len(gone), ending), clients=left_batch(state, gone),
    )


def _pinned(state: State, pool: pools.Pool, row: int) -> pools.Pool:
    """The pool with pins for what the request of a row that leaves wants to stay, as far as the prefix index has it.

    The last token is left out: nothing has computed it for this request, and where it ends an answer a log without texts shows
    it as it is, so that a block of another request with the same tokens has another name there.
    """
    config, request = state.config, state.requests[int(state.rows.id[row])]
    history, size = row_tokens(state, row), config.block_size
    for tokens, seconds in request.sampling.retention:
        keys = leading_hashes(root_of(state, request), history.tobytes(), size, min(tokens, len(history) - 1) // size)
        if config.windows:
            hits = longest_hit(config, pool, keys)
        else:
            hits = with_snapshot(pool, keys, longest_prefix(pool, keys, len(keys)))
        if len(hits) == 0:
            continue
        ends = ends_of(len(hits) // config.group_count, state.clock + seconds).repeat(config.group_count)
        pool = pools.pin(pool, hits[hits != NULL], ends[hits != NULL], config.pinned_pages_max)
        pool = with_pin(config, pool, keys[len(hits) // config.group_count - 1], int(ends[-1]))
    return pool


def count_ended(state: State, count: int, ending: Ending) -> Counters:
    return replace(state.counters, **{ending: getattr(state.counters, ending) + count})
