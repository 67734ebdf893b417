"""Explaining: the decision once more, and for every request that computes nothing in it, why.

A plain twin of schedule.py: the same walk over rows and queue, telling where it stops. Its plan is schedule's own, by
test, so its reasons are the scheduler's and nobody's guess. Never called by an engine: the log's tool asks afterwards.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from vnext.sched.admission import chunk
from vnext.sched.preemption import make_room
from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.admitting import claim, fits, fresh_pages, hit_tokens_of, prefix_hits, shared
from vnext.state.config import SchedulerConfig
from vnext.state.events import StepPlanned
from vnext.state.expected import Work, expected_work
from vnext.state.planning import planned_work, without_rows
from vnext.state.pool import Pool
from vnext.state.rows import Rows, wants
from vnext.state.state import State, Waiting

Why = Literal["budget", "blocks", "sequences", "order", "preempted", "room"]
"""budget: the step's tokens are used up by those before it, or too few for a prompt that may not be cut
blocks: it is the best of those that wait, and the cache has too few free blocks for it
sequences: as many requests run as may
order: a better one waits for one of the reasons above, and nobody overtakes
preempted: it gives way in this step, the worst of those that run where blocks are missing
room: others give way in this step, and nobody is admitted then"""
NOBODY = -1


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One request that computes nothing. It needs `need` where there are `have`: tokens, blocks or requests, by `why`.

    `behind` is the request that stands in its way (order), else NOBODY.
    """

    id: int
    why: Why
    need: int
    have: int
    behind: int = NOBODY


class Explanation(msgspec.Struct, frozen=True):
    """`plan` is `schedule(state)`; `waits` has each live request once that has something to compute and does not."""

    plan: StepPlanned | None
    waits: tuple[Wait, ...]


def explain(state: State) -> Explanation:
    """The decision in this state and why it is not more. No waits while the pipeline is full: there is no step then."""
    if len(state.flights) >= state.config.pipeline_depth:
        return Explanation(None, ())
    work = expected_work(state.config, state.rows)
    if work.pages_sum > state.pool.free:
        return _explain_room(state, work)
    held_up = _held_up(state.rows, work.tokens, max(0, state.config.batch_tokens_max - work.tokens_sum))
    admitted, waits = _explain_admissions(state, work)
    if work.tokens_sum == 0 and not admitted:
        return Explanation(None, (*held_up, *waits))
    return Explanation(StepPlanned(step=state.planned, admitted=tuple(admitted)), (*held_up, *waits))


def first_bound(config: SchedulerConfig, tokens: int, running: int) -> Why | None:
    """Why nobody can join a step in which `running` requests have taken so many tokens, before anybody is tried."""
    if tokens >= config.batch_tokens_max:
        return "budget"
    return "sequences" if running >= config.running_max else None


def bound_behind(config: SchedulerConfig, plan: StepPlanned, tokens: int, running: int) -> Why | None:
    """Why nobody could join a step behind those that its plan admits, before anybody else is tried: it has `tokens` now, of
    `running` requests. None where only `explain` can tell."""
    if plan.preempted or plan.changed:
        return None
    if plan.admitted and running >= config.running_max:
        return "sequences"  # asked for first where somebody was tried
    return first_bound(config, tokens, running)


def _held_up(rows: Rows, tokens: np.ndarray, left: int) -> list[Wait]:
    """Running requests that get nothing (tokens int64[R]): the budget is used up before them."""
    wanted = wants(rows)
    places = np.flatnonzero((tokens == 0) & (wanted > 0)).tolist()
    return [Wait(id=int(rows.id[row]), why="budget", need=int(wanted[row]), have=left) for row in places]


def _explain_room(state: State, work: Work) -> Explanation:
    """A step in which some rows give way."""
    plan = make_room(state)
    need, have = work.pages_sum, state.pool.free
    waits = [Wait(id=entry.id, why="room", need=need, have=have) for entry in state.waiting]
    gone = plan.preempted if plan else ()
    waits += [Wait(id=int(state.rows.id[row]), why="preempted", need=need, have=have) for row in gone]
    if plan is not None:
        rest = msgspec.structs.replace(state, rows=without_rows(state.rows, gone))
        tokens = planned_work(rest, plan.changed)
        waits += _held_up(rest.rows, tokens.tokens, state.config.batch_tokens_max - tokens.tokens_sum)
    return Explanation(plan, tuple(waits))


def _explain_admissions(state: State, work: Work) -> tuple[list[tuple[int, int]], list[Wait]]:
    """(place in the queue, tokens) of those that join, and why the others do not."""
    config, queue = state.config, state.waiting
    budget, room = config.batch_tokens_max - work.tokens_sum, config.running_max - len(state.rows)
    match first_bound(config, work.tokens_sum, len(state.rows)):
        case "budget":
            return [], [_out_of_budget(entry, 0) for entry in queue]
        case "sequences":
            return [], [_too_many(entry, config.running_max) for entry in queue]
    pool, _ = pools.take(state.pool, work.pages_sum)
    admitted: list[tuple[int, int]] = []
    ranked = list(places_best_first(state, len(queue)))
    for number, place in enumerate(ranked):
        entry, rest = queue[place], [queue[other] for other in ranked[number:]]
        if number == room:
            return admitted, [_too_many(each, config.running_max) for each in rest]
        if budget == 0:
            return admitted, [_out_of_budget(each, 0) for each in rest]
        hits = prefix_hits(config, pool, entry)
        tokens = chunk(config, entry.known - hit_tokens_of(config, hits), budget)
        if tokens == 0 or not fits(config, pool, hits, tokens):
            first = _out_of_budget(entry, budget) if tokens == 0 else _out_of_blocks(state, pool, entry, hits, tokens)
            behind = [Wait(id=each.id, why="order", need=0, have=0, behind=entry.id) for each in rest[1:]]
            return admitted, [first, *behind]
        admitted.append((place, tokens))
        budget -= tokens
        pool = claim(config, pool, entry, hits, tokens).pool
    return admitted, []


def _out_of_budget(entry: Waiting, have: int) -> Wait:
    return Wait(id=entry.id, why="budget", need=entry.known, have=have)


def _too_many(entry: Waiting, running_max: int) -> Wait:
    return Wait(id=entry.id, why="sequences", need=running_max + 1, have=running_max)


def _out_of_blocks(state: State, pool: Pool, entry: Waiting, hits: np.ndarray, tokens: int) -> Wait:
    """What admitting.fits has asked for: missing blocks, and hits that are free now."""
    config = state.config
    need, held = fresh_pages(config, hits, tokens), shared(config, hits)
    revived = int((pool.status.at(held) >= 0).sum()) if len(held) else 0
    return Wait(id=entry.id, why="blocks", need=need + revived, have=pool.free)
