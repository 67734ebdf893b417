"""Explaining: repeat a decision and give the reason for every request that computes nothing in it.

A plain form of schedule.py: the same walk over rows and queue, which also reports where it stops. Tests require its
plan to equal that of `schedule`, so its reasons are the scheduler's. The engine never calls it; the log tool does,
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from vnext.sched.admission import admitted_max, chunk, in_flight_max
from vnext.sched.preemption import make_room
from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.allocate import allocate, fits, hit_tokens_of, new_page_count, prefix_hits, shared
from vnext.state.config import SchedulerConfig
from vnext.state.events import StepPlanned
from vnext.state.expected import Work, expected_work, in_turn
from vnext.state.facilities.adapters import may_run
from vnext.state.facilities.tier import transferring
from vnext.state.facilities.weights import has_begun
from vnext.state.fold_plan import planned_work
from vnext.state.pool import Pool
from vnext.state.preempt import without_rows
from vnext.state.state import State, Waiting
from vnext.state.store.rows import Rows, wants

Why = Literal["budget", "blocks", "sequences", "adapter", "order", "preempted", "room", "caution", "pause", "disk", "microbatch"]
"""budget: requests before it use up the step's tokens, or leave too few for a prompt that may not be split
blocks: it is the best waiting request, and the cache has too few free pages for it
sequences: the batch has its maximum number of requests
adapter: it is the best waiting request, and no slot holds its LoRA adapter yet
order: a better request waits for one of the reasons above, and no request may overtake it
preempted: it is preempted in this step, as the worst running request when pages are missing
room: other requests are preempted in this step, which therefore admits none
caution: behind fatal steps, requests are admitted one at a time
pause: the engine is paused
disk: its blocks are being read from disk; others overtake it
microbatch: its token is in flight, or it is the turn of others that decode
"""
NOBODY = -1


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One request that computes nothing. It needs `need` where `have` are available: tokens, pages or requests, by `why`.

    `behind` is the request that it waits behind (order), otherwise NOBODY.
    """

    id: int
    why: Why
    need: int
    have: int
    behind: int = NOBODY


class Explanation(msgspec.Struct, frozen=True):
    """`plan` is `schedule(state)`; `waits` has one entry for each live request that could compute something and does not."""

    plan: StepPlanned | None
    waits: tuple[Wait, ...]


def explain(state: State) -> Explanation:
    """The decision in this state, and the reason for every wait. No waits while the pipeline is full, as there is no step."""
    if len(state.in_flight) >= in_flight_max(state):
        return Explanation(None, ())
    if state.paused not in ("", "wait"):
        going = state.rows.id[wants(state.rows) > 0].tolist()
        return Explanation(None, tuple(map(_paused, (*going, *(entry.id for entry in state.waiting)))))
    work = expected_work(state)
    if work.pages_sum > state.pool.free:
        return _explain_room(state, work)
    held_up = _held_up(state.rows, work, in_turn(state), state.config.max_num_batched_tokens)
    admitted, waits = _explain_admissions(state, work)
    if moving := transferring(state):
        waits = [wait for wait in waits if wait.id not in moving]
        waits += [Wait(id=entry.id, why="disk", need=0, have=0) for entry in state.waiting if entry.id in moving]
    if state.paused:
        fresh = {entry.id for entry in state.waiting if not has_begun(state, entry)}
        waits = [*(wait for wait in waits if wait.id not in fresh), *map(_paused, sorted(fresh))]
    if work.tokens_sum == 0 and not admitted:
        return Explanation(None, (*held_up, *waits))
    return Explanation(StepPlanned(step=state.planned, admitted=tuple(admitted)), (*held_up, *waits))


def _paused(id_: int) -> Wait:
    return Wait(id=id_, why="pause", need=0, have=0)


def first_bound(config: SchedulerConfig, tokens: int, running: int) -> Why | None:
    """Why no request can join a step in which `running` requests have taken `tokens`, before any request is tried."""
    if tokens >= config.max_num_batched_tokens:
        return "budget"
    return "sequences" if running >= config.max_num_seqs else None


def bound_behind(config: SchedulerConfig, plan: StepPlanned, tokens: int, running: int) -> Why | None:
    """Why no request could join the step behind those that `plan` admits, before another is tried.

    The step has `tokens` now, and `running` requests run. None if only `explain` can tell.
    """
    if plan.preempted or plan.changed:
        return None
    if plan.admitted and running >= config.max_num_seqs:
        return "sequences"  # checked first if a request was tried
    return first_bound(config, tokens, running)


def _held_up(rows: Rows, work: Work, turn: np.ndarray, budget: int) -> list[Wait]:
    """Running requests that get nothing, because it is not their turn (bool[R]) or the rows before them use up the budget."""
    wanted, left = wants(rows), budget - work.tokens_sum
    places = np.flatnonzero((work.tokens == 0) & (wanted > 0)).tolist()
    return [
        Wait(id=int(rows.id[row]), why="budget", need=int(wanted[row]), have=left)
        if turn[row] else Wait(id=int(rows.id[row]), why="microbatch", need=1, have=0) for row in places
    ]  # fmt: skip


def _explain_room(state: State, work: Work) -> Explanation:
    """The explanation of a step that preempts some rows."""
    plan = make_room(state)
    need, have = work.pages_sum, state.pool.free
    waits = [Wait(id=entry.id, why="room", need=need, have=have) for entry in state.waiting]
    gone = plan.preempted if plan else ()
    waits += [Wait(id=int(state.rows.id[row]), why="preempted", need=need, have=have) for row in gone]
    if plan is not None:
        rest = msgspec.structs.replace(state, rows=without_rows(state.rows, gone))
        turn = np.delete(in_turn(state), gone)
        waits += _held_up(rest.rows, planned_work(rest, plan.changed), turn, state.config.max_num_batched_tokens)
    return Explanation(plan, tuple(waits))


def _explain_admissions(state: State, work: Work) -> tuple[list[tuple[int, int]], list[Wait]]:
    """(place in the queue, tokens) of the requests that join, and the reasons why the others do not."""
    config, queue = state.config, state.waiting
    budget, room = config.max_num_batched_tokens - work.tokens_sum, admitted_max(state)
    match first_bound(config, work.tokens_sum, len(state.rows)):
        case "budget":
            return [], [_out_of_budget(config, state.pool, entry, 0) for entry in queue]
        case "sequences":
            return [], [_too_many(entry, config.max_num_seqs) for entry in queue]
    pool, _ = pools.take(state.pool, work.pages_sum)
    admitted: list[tuple[int, int]] = []
    moving = transferring(state)
    ranked = [place for place in places_best_first(state, len(queue)) if queue[place].id not in moving]
    for number, place in enumerate(ranked):
        entry, rest = queue[place], [queue[other] for other in ranked[number:]]
        if number == room:
            return admitted, [_held_back(state, each, number) for each in rest]
        if budget == 0:
            return admitted, [_out_of_budget(config, pool, each, 0) for each in rest]
        hits = prefix_hits(config, pool, entry)
        tokens = chunk(config, entry.known - hit_tokens_of(config, hits), budget)
        if not may_run(state, entry.id):
            return admitted, _behind(Wait(id=entry.id, why="adapter", need=1, have=0), rest[1:])
        if tokens == 0:
            return admitted, _behind(_out_of_budget(config, pool, entry, budget), rest[1:])
        if not fits(config, pool, hits, tokens):
            return admitted, _behind(_out_of_blocks(state, pool, entry, hits, tokens), rest[1:])
        admitted.append((place, tokens))
        budget -= tokens
        pool = allocate(config, pool, entry, hits, tokens).pool
    return admitted, []


def _behind(first: Wait, others: Sequence[Waiting]) -> list[Wait]:
    """The wait of the best waiting request, and those of the requests that may not overtake it."""
    return [first, *(Wait(id=each.id, why="order", need=0, have=0, behind=first.id) for each in others)]


def _out_of_budget(config: SchedulerConfig, pool: Pool, entry: Waiting, have: int) -> Wait:
    """A wait for budget: the request needs the tokens that the cache does not have."""
    hits = hit_tokens_of(config, prefix_hits(config, pool, entry))
    return Wait(id=entry.id, why="budget", need=entry.known - hits, have=have)


def _too_many(entry: Waiting, max_num_seqs: int) -> Wait:
    return Wait(id=entry.id, why="sequences", need=max_num_seqs + 1, have=max_num_seqs)


def _held_back(state: State, entry: Waiting, admitted: int) -> Wait:
    """A wait for others: too many run, or a cautious state has `admitted` as many as it does at once."""
    if len(state.rows) + admitted < state.config.max_num_seqs:
        return Wait(id=entry.id, why="caution", need=1, have=0)
    return _too_many(entry, state.config.max_num_seqs)


def _out_of_blocks(state: State, pool: Pool, entry: Waiting, hits: np.ndarray, tokens: int) -> Wait:
    """A wait for pages, counted as allocate.fits does: missing pages, and hits that are free now."""
    config = state.config
    need, held = new_page_count(config, hits, tokens), shared(config, hits)
    revived = int((pool.status.at(held) >= 0).sum()) if len(held) else 0
    return Wait(id=entry.id, why="blocks", need=need + revived, have=pool.free)
