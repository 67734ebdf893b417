"""Explaining: repeat a decision and give the reason for every request that computes nothing in it.

The reasons are the verdicts of admission.py, at the first of which the schedule stops, and for running requests what the plan
leaves out. The engine never calls it; the log tool does, afterwards.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.sched.admission import Wait, Why, in_flight_max, verdicts
from vnext.sched.preemption import make_room
from vnext.sched.ranking import places_best_first
from vnext.state.config import SchedulerConfig
from vnext.state.events import StepPlanned
from vnext.state.expected import Work, expected_work, in_turn
from vnext.state.facilities.tier import transferring
from vnext.state.facilities.weights import has_begun
from vnext.state.fold_plan import planned_work
from vnext.state.state import State
from vnext.state.store.rows import Rows, wants, without_rows


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
    held_up = _held_up(state.config, state.rows, work, in_turn(state))
    moving, queue = transferring(state), state.waiting
    places = [place for place in places_best_first(state, len(queue)) if queue[place].id not in moving]
    admitted, waits = list[tuple[int, int]](), list[Wait]()
    for place, verdict in verdicts(state, places, work):
        waits.append(verdict) if isinstance(verdict, Wait) else admitted.append((place, verdict))
    waits += [Wait(id=entry.id, why="disk", need=1, have=0) for entry in queue if entry.id in moving]
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


def _held_up(config: SchedulerConfig, rows: Rows, work: Work, turn: np.ndarray) -> list[Wait]:
    """Running requests that get nothing, because it is not their turn (bool[R]), or the rows before them use up the budget or begin
    as many inputs as may, or their own input is not encoded yet."""
    wanted, left = wants(rows), config.max_num_batched_tokens - work.tokens_sum
    why: Why = "inputs" if config.inputs_a_step and left > 0 else "budget"
    places = np.flatnonzero((work.tokens == 0) & (wanted > 0)).tolist()
    return [
        Wait(id=int(rows.id[row]), why=why, need=int(wanted[row]), have=left)
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
        waits += _held_up(state.config, rest.rows, planned_work(rest, plan.changed), turn)
    return Explanation(plan, tuple(waits))
