"""Laws of a decision: what must hold between a state, the plan made in it, and the state after.

The laws of a state alone are in vnext/state/laws.py. These need the state before as well, so they run in the simulator
and in tests, beside the code that decides.
"""

from __future__ import annotations

import numpy as np

from vnext.state import rows as columns
from vnext.state.admitting import fits
from vnext.state.errors import LawBroken
from vnext.state.events import StepPlanned
from vnext.state.state import State


def check_decision(before: State, plan: StepPlanned | None, after: State) -> None:
    """All laws of one decision. Raises LawBroken."""
    if plan is None:
        work_is_conserved(before)
        return
    nobody_is_passed_over(before, plan, after)
    victims_are_the_worst(before, plan)
    ranges_continue(before, plan, after)


def work_is_conserved(state: State) -> None:
    """S6: without a step in flight, an engine that has requests always finds something to compute."""
    if state.requests and not state.flights:
        raise LawBroken("S6", f"{len(state.requests)} requests live and the decision is to do nothing")


def nobody_is_passed_over(before: State, plan: StepPlanned, after: State) -> None:
    """S3: admitted are the first of the queue, and the next one does not fit."""
    places = [place for place, _ in plan.admitted]
    if places != list(range(len(places))):
        raise LawBroken("S3", f"admitted are the places {places} of the queue")
    config, free_rows = before.config, before.config.running_max - len(after.rows)
    budget = config.batch_tokens_max - int(after.flights[-1].counts.sum())
    if config.prefix_caching or plan.preempted or not after.waiting or free_rows == 0 or budget == 0:
        return
    rest = after.waiting[0].known
    tokens = min(rest, config.prefill_threshold or rest, budget)
    no_hits = np.empty(0, dtype=np.int32)
    if (config.chunked_prefill or tokens == rest) and fits(config, after.pool, no_hits, tokens):
        raise LawBroken("S3", f"request {after.waiting[0].id} waits and {tokens} of its tokens would fit")


def victims_are_the_worst(before: State, plan: StepPlanned) -> None:
    """S4: every row that gives way is worse than every row that stays; nobody is admitted in such a step."""
    if not plan.preempted:
        return
    rows, gone = before.rows, set(plan.preempted)
    ranked = before.config.policy == "priority"
    priority = rows.cells[columns.PRIORITY] if ranked else np.zeros(len(rows), dtype=np.int64)
    keys = list(zip(priority.tolist(), rows.id.tolist() if ranked else range(len(rows))))
    best_victim = min(keys[row] for row in gone)
    if plan.admitted or any(keys[row] > best_victim for row in range(len(rows)) if row not in gone):
        raise LawBroken("S4", f"rows {plan.preempted} give way while worse rows stay or others are admitted")


def ranges_continue(before: State, plan: StepPlanned, after: State) -> None:
    """S2: a running request's range starts where the last one ended; an admitted one's starts behind its hits."""
    flight = after.flights[-1]
    computed = dict(zip(before.rows.id.tolist(), before.rows.computed.tolist()))
    cells = after.rows.cells
    ends = dict(zip(after.rows.id.tolist(), cells[columns.COMPUTED].tolist()))
    for id_, start, count in zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist()):
        if start + count != ends[id_]:
            raise LawBroken("S2", f"request {id_} computes up to {start + count} and counts {ends[id_]}")
        if id_ in computed and start != computed[id_]:
            raise LawBroken("S2", f"request {id_} starts at {start}, not at {computed[id_]}")
        if id_ not in computed and start % before.config.block_size:
            raise LawBroken("S2", f"request {id_} starts inside a block")
