"""Fold a commit of a step with drafts: which row takes which tokens, and what is taken back for drafts that were not kept.

A request's tokens end at the first one that ends it, as without drafts; tokens behind it are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from vnext.state.drafting import updated_rate
from vnext.state.errors import require
from vnext.state.events import StepCommitted
from vnext.state.samples import runs_in
from vnext.state.state import State, StepInFlight
from vnext.state.store import extents, fields
from vnext.state.store.rows import Rows, find_rows

replace = msgspec.structs.replace


class Runs(msgspec.Struct, frozen=True):
    """The live requests that sampled in a step: `rows`, the tokens each sampled (`counts`), the drafts `planned` for it and
    those really `drafted` (int64[n] each)."""

    rows: np.ndarray
    counts: np.ndarray
    planned: np.ndarray
    drafted: np.ndarray


def runs_of(state: State, event: StepCommitted) -> tuple[Runs, np.ndarray]:
    """The runs of the oldest step, and for each of the event's tokens its run or -1 if the request has left (int64[T]).

    IllegalEvent if the event's counts are not those of the step.
    """
    scheduled = state.in_flight[0]
    assert scheduled.drafts is not None
    asked = scheduled.samples.nonzero()[0]
    planned = scheduled.drafts[asked]
    counts, drafted = runs_in(event, len(asked))
    require(len(counts) == len(drafted) == len(asked), f"step {event.step} sampled for {len(counts)} requests of {len(asked)}")
    require(bool((drafted <= planned).all()), f"step {event.step} computed more drafts than were planned")
    require(bool(((counts >= 1) & (counts <= drafted + 1)).all()), f"step {event.step} keeps more tokens than it sampled")
    given = len(event.tokens) // 4
    require(int(counts.sum()) == given, f"step {event.step} sampled {given} tokens where {int(counts.sum())} were counted")
    rows = find_rows(state.rows, scheduled.ids[asked], scheduled.preemption_counts[asked])
    alive = rows >= 0
    run_of = np.where(alive, np.cumsum(alive) - 1, -1).repeat(counts)
    return Runs(rows[alive], counts[alive], planned[alive], drafted[alive]), run_of


def places_in_runs(counts: np.ndarray) -> np.ndarray:
    """The place of each token in its run (int64[sum of counts])."""
    return extents.spans(np.zeros_like(counts), counts)


def rounds(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Which entries of `rows` (int64[n]) are the first of their row, then which are the second, and so on (bool[n] each).

    The entries of one row are adjacent.
    """
    firsts = np.flatnonzero(np.diff(rows, prepend=-1))
    places = places_in_runs(np.diff(firsts, append=len(rows)))
    for place in range(int(places.max(initial=-1)) + 1):
        yield places == place


def up_to_first(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which tokens of the runs precede or are the first for which `ends` (bool[T]) is true (bool[T])."""
    before = np.cumsum(ends) - ends
    firsts = np.cumsum(counts) - counts
    kept: np.ndarray = before == np.repeat(before[firsts], counts)
    return kept


def settle(state: State, runs: Runs, ended: np.ndarray) -> State:
    """The state after the drafts that were not kept are taken back from the rows and from the steps in flight.

    `state` already has the runs' tokens, and its oldest step is still in flight. Rows in `ended` (int64[n]) hold the pages
    that they held before, because they release all of them at once.
    """
    rejected = runs.planned + 1 - runs.counts
    cells, drafting = state.rows.cells.copy(), state.rows.drafting
    assert drafting is not None
    drafting = drafting.copy()
    cells[fields.COMPUTED, runs.rows] -= rejected
    cells[fields.PLACEHOLDERS, runs.rows] -= rejected
    drafting[fields.TENTATIVE, runs.rows] -= runs.planned
    drafting[fields.TENTATIVE, ended] = cells[fields.COMPUTED, ended] - state.rows.computed_at_least[ended]
    drafting[fields.RATE, runs.rows] = updated_rate(drafting[fields.RATE, runs.rows], runs.drafted, runs.counts - 1)
    owners = zip(state.rows.id[runs.rows].tolist(), state.rows.preemption_count[runs.rows].tolist())
    back = {owner: by for owner, by in zip(owners, rejected.tolist()) if by}
    counters = state.counters
    return replace(
        state,
        rows=Rows(cells, drafting),
        in_flight=(state.in_flight[0], *(_moved(scheduled, back) for scheduled in state.in_flight[1:])),
        counters=replace(
            counters,
            draft_tokens=counters.draft_tokens + int(runs.drafted.sum()),
            accepted_tokens=counters.accepted_tokens + int((runs.counts - 1).sum()),
        ),
    )


def _moved(scheduled: StepInFlight, back: dict[tuple[int, int], int]) -> StepInFlight:
    """The step, starting as many tokens earlier in each request as `back` says."""
    if not back:
        return scheduled
    pairs = zip(scheduled.ids.tolist(), scheduled.preemption_counts.tolist())
    by = np.array([back.get(pair, 0) for pair in pairs], dtype=np.int64)
    entries = scheduled.entries.copy()
    entries[2] -= by
    return replace(scheduled, entries=entries)
