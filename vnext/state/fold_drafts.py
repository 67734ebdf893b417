"""Fold a commit of a step with drafts: which row takes which tokens, and what is taken back for drafts that were not kept.

A request's tokens end at the first one that ends it, as without drafts; tokens behind it are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from vnext.state.errors import require
from vnext.state.events import StepCommitted
from vnext.state.recurrent import without_untrue
from vnext.state.state import State, StepInFlight, runs_in
from vnext.state.store import columns, fields
from vnext.state.store.drafts_numpy import places_in_runs
from vnext.state.store.rows import Rows, find_rows

replace = msgspec.structs.replace


class Runs(msgspec.Struct, frozen=True):
    """The live requests that sampled in a step: `rows`, the tokens each sampled (`counts`), the drafts `planned` for it and
    those really `drafted` (int64[n] each)."""

    rows: np.ndarray
    counts: np.ndarray
    planned: np.ndarray
    drafted: np.ndarray


def runs_in_place(state: State, event: StepCommitted) -> Runs:
    """The runs of the oldest step if its requests are still the first rows and the event's counts are the step's."""
    scheduled = state.in_flight[0]
    assert scheduled.drafts is not None
    asked = scheduled.samples.nonzero()[0]
    counts, drafted = runs_in(event, len(asked))
    return Runs(asked, counts, scheduled.drafts[asked], drafted)


def runs_of(state: State, event: StepCommitted) -> tuple[Runs, np.ndarray]:
    """The runs of the oldest step, and for each of the event's tokens its run or -1 if the request has left (int64[T]).

    IllegalEvent if the event's counts are not those of the step.
    """
    scheduled, runs = state.in_flight[0], runs_in_place(state, event)
    asked, counts, planned, drafted = runs.rows, runs.counts, runs.planned, runs.drafted
    require(len(counts) == len(drafted) == len(asked), f"step {event.step} sampled for {len(counts)} requests of {len(asked)}")
    require(bool((drafted <= planned).all()), f"step {event.step} computed more drafts than were planned")
    require(bool(((counts >= 1) & (counts <= drafted + 1)).all()), f"step {event.step} keeps more tokens than it sampled")
    given = len(event.tokens) // 4
    require(int(counts.sum()) == given, f"step {event.step} sampled {given} tokens where {int(counts.sum())} were counted")
    rows = find_rows(state.rows, scheduled.ids[asked], scheduled.preemption_counts[asked])
    alive = rows >= 0
    run_of = np.where(alive, np.cumsum(alive) - 1, -1).repeat(counts)
    return Runs(rows[alive], counts[alive], planned[alive], drafted[alive]), run_of


def rounds(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Which entries of `rows` (int64[n]) are the first of their row, then which are the second, and so on (bool[n] each).

    The entries of one row are adjacent.
    """
    firsts = np.flatnonzero(np.diff(rows, prepend=-1))
    places = places_in_runs(np.diff(firsts, append=len(rows)))
    for place in range(int(places.max(initial=-1)) + 1):
        yield places == place


def settle(state: State, runs: Runs, ended: np.ndarray) -> State:
    """The state after the drafts that were not kept are taken back from the rows and from the steps in flight.

    `state` already has the runs' tokens, and its oldest step is still in flight. Rows in `ended` (int64[n]) hold the pages
    that they held before, because they release all of them at once.
    """
    before = state.rows
    assert before.drafting is not None
    cells, drafting, back = before.cells.copy(), before.drafting.copy(), np.empty(len(before), dtype=np.int64)
    drafted, kept = columns.impl.settle(cells, drafting, runs.rows, (runs.counts, runs.drafted, runs.planned), back)
    if len(ended):
        drafting[fields.TENTATIVE, ended] = cells[fields.COMPUTED, ended] - before.computed_at_least[ended]
    rows = Rows(cells, drafting, without_untrue(before.recurrent, cells[fields.KNOWN], back))
    counters, in_flight = state.counters, state.in_flight
    if back.any():
        in_flight = (in_flight[0], *(_moved(scheduled, rows, back) for scheduled in in_flight[1:]))
    counters = replace(
        counters, draft_tokens=counters.draft_tokens + drafted, accepted_tokens=counters.accepted_tokens + kept
    )
    return replace(state, rows=rows, in_flight=in_flight, counters=counters)


def _moved(scheduled: StepInFlight, rows: Rows, back: np.ndarray) -> StepInFlight:
    """The step, starting as many tokens earlier in each request as `back` (int64[R]) says."""
    found = find_rows(rows, scheduled.ids, scheduled.preemption_counts)
    entries = scheduled.entries.copy()
    entries[2] -= np.where(found >= 0, back[found], 0)
    return replace(scheduled, entries=entries)
