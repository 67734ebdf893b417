"""Laws of a decision and of an event: what must hold between a state, what happened to it, and the state after.

The laws of a state alone are in vnext/state/laws.py. These need the state before as well, so they run in the simulator
and in tests, beside the code that decides. The order of the built-in policies is spelled here a second time, so that a
policy that is wrong is noticed too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vnext.sched.ranking import keys
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, RequestArrived, StepPlanned
from vnext.state.planning import row_blocks
from vnext.state.state import State, Waiting, blocks_for


def check_decision(before: State, plan: StepPlanned | None, after: State) -> None:
    """All laws of one decision. Raises LawBroken."""
    if plan is None:
        work_is_conserved(before)
        return
    budget_is_used(before, plan, after)
    nobody_is_passed_over(before, plan, after)
    victims_are_the_worst(before, plan)
    victims_are_needed(before, plan)
    ranges_continue(before, plan, after)


def check_event(before: State, event: AnyEvent, after: State) -> None:
    """The laws of any one event. Raises LawBroken."""
    epochs_are_new(before, event, after)
    arrivals_come_in_order(after)
    if isinstance(event, RequestArrived) or before.rows is after.rows:
        return
    left = set(after.rows.id.tolist())
    rows = [row for row, id_ in enumerate(before.rows.id.tolist()) if id_ not in left]
    if rows:
        tails_leave_first(before, rows, after)
        endings_have_no_name(before, rows, after)


# ---- decisions ---------------------------------------------------------------------------------------------------


def policy_keys(state: State) -> dict[int, tuple]:
    """Key of every live request; the smallest is served first."""
    if state.config.policy not in ("fcfs", "priority"):
        return keys(state)
    live = (*(entry.id for entry in state.waiting), *state.rows.id.tolist())
    if state.config.policy == "fcfs":
        return {id_: (id_,) for id_ in live}
    return {id_: (state.requests[id_].priority, id_) for id_ in live}


def wanted(state: State) -> list[int]:
    """Tokens that each row could take alone. The one at its limit is never computed: nothing is sampled after it."""
    rows, most = state.rows, state.config.prefill_threshold or state.config.model_len_max
    columns = (rows.known.tolist(), rows.pending.tolist(), rows.limit.tolist(), rows.computed.tolist())
    return [
        min(min(known + pending, limit - 1) - computed, most) for known, pending, limit, computed in zip(*columns)
    ]


def served(state: State, among: Sequence[int], any_budget: bool = False) -> tuple[list[int], int]:
    """What these rows take in order under the budget, and the blocks they lack for it."""
    want, need = wanted(state), 0
    budget = sum(want) if any_budget else state.config.batch_tokens_max
    computed, blocks, tokens = state.rows.computed.tolist(), state.rows.blocks.tolist(), []
    for row in among:
        tokens.append(min(want[row], budget))
        budget -= tokens[-1]
        need += max(blocks_for(computed[row] + tokens[-1], state.config.block_size) - blocks[row], 0)
    return tokens, need


def work_is_conserved(state: State) -> None:
    """S6: whoever decides to do nothing has no place in the pipeline, or nothing that could be computed."""
    if not state.requests or len(state.flights) >= state.config.pipeline_depth:
        return
    if not state.flights:
        raise LawBroken("S6", f"{len(state.requests)} requests live and the decision is to do nothing")
    tokens, need = served(state, range(len(state.rows)))
    if any(tokens) and need <= state.pool.free:
        raise LawBroken("S6", f"{sum(tokens)} tokens could be computed and the decision is to do nothing")
    if not any(tokens) and state.waiting and len(state.rows) < state.config.running_max:
        key_of = policy_keys(state)
        _must_wait(state, min(state.waiting, key=lambda entry: key_of[entry.id]), state.config.batch_tokens_max)


def budget_is_used(before: State, plan: StepPlanned, after: State) -> None:
    """S6: while budget remains, every row that stays takes all it may."""
    config, flight = before.config, after.flights[-1]
    if plan.preempted or int(flight.counts.sum()) == config.batch_tokens_max:
        return  # who was served while somebody still held budget, and gave it back, may have taken less
    took = dict(zip(flight.ids.tolist(), flight.counts.tolist()))
    for id_, count in zip(before.rows.id.tolist(), wanted(before)):
        if took.get(id_, 0) != count:
            raise LawBroken("S6", f"request {id_} takes {took.get(id_, 0)} of {count} tokens, and budget remains")
    most = config.prefill_threshold or config.model_len_max
    starts = dict(zip(flight.ids.tolist(), flight.starts.tolist()))
    for place, tokens in plan.admitted:
        waiting = before.waiting[place]
        if tokens != min(waiting.known - starts[waiting.id], most):
            raise LawBroken("S6", f"request {waiting.id} begins with {tokens} tokens, and budget remains")


def nobody_is_passed_over(before: State, plan: StepPlanned, after: State) -> None:
    """S3: admitted are the best of the queue by policy, best first, and the next one does not fit."""
    if not before.waiting:
        return
    key_of = policy_keys(before)
    best_first = sorted((entry.id for entry in before.waiting), key=key_of.__getitem__)
    admitted = [before.waiting[place].id for place, _ in plan.admitted]
    if admitted != best_first[: len(admitted)]:
        raise LawBroken("S3", f"admitted are the requests {admitted} where the best are {best_first[: len(admitted)]}")
    budget = before.config.batch_tokens_max - int(after.flights[-1].counts.sum())
    if after.waiting and not plan.preempted and len(after.rows) < before.config.running_max and budget > 0:
        _must_wait(after, min(after.waiting, key=lambda entry: key_of[entry.id]), budget)


def _must_wait(state: State, best: Waiting, budget: int) -> None:
    """S3 of one request. With the cache on it counts as fitting only if it fits whatever prefix the cache has of it."""
    config = state.config
    tokens = min(best.known, config.prefill_threshold or best.known, budget)
    kept = (best.known - 1) // config.block_size if config.prefix_caching else 0
    whole = config.chunked_prefill or tokens == best.known
    if whole and blocks_for(tokens, config.block_size) + kept <= state.pool.free:
        raise LawBroken("S3", f"request {best.id} waits and {tokens} of its tokens would fit")


def victims_are_the_worst(before: State, plan: StepPlanned) -> None:
    """S4: every row that gives way is worse than every row that stays; nobody is admitted in such a step."""
    if not plan.preempted:
        return
    key_of, ids, gone = policy_keys(before), before.rows.id.tolist(), set(plan.preempted)
    best_victim = min(key_of[ids[row]] for row in plan.preempted)
    if plan.admitted or any(key_of[id_] > best_victim for row, id_ in enumerate(ids) if row not in gone):
        raise LawBroken("S4", f"rows {plan.preempted} give way while worse rows stay or others are admitted")


def victims_are_needed(before: State, plan: StepPlanned) -> None:
    """S4: without the last that gave way, the others could not have been served.

    Under another order than first-come a row's tokens depend on who held budget while it was served, so they count as
    served only if they were under any budget.
    """
    if not plan.preempted:
        return
    gone, ref = plan.preempted[:-1], before.pool.ref
    free = before.pool.free
    for row in gone:
        blocks = row_blocks(before, row)
        ref[blocks] -= 1
        free += int(np.count_nonzero(ref[blocks] == 0))
    stay = [row for row in range(len(before.rows)) if row not in gone]
    if served(before, stay, before.config.policy != "fcfs")[1] <= free:
        raise LawBroken("S4", f"row {plan.preempted[-1]} gives way where {free} free blocks would have served everybody")


def ranges_continue(before: State, plan: StepPlanned, after: State) -> None:
    """S2: a running request's range starts where the last one ended; an admitted one's starts behind its hits."""
    flight = after.flights[-1]
    computed = dict(zip(before.rows.id.tolist(), before.rows.computed.tolist()))
    ends = dict(zip(after.rows.id.tolist(), after.rows.computed.tolist()))
    for id_, start, count in zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist()):
        if start + count != ends[id_]:
            raise LawBroken("S2", f"request {id_} computes up to {start + count} and counts {ends[id_]}")
        if id_ in computed and start != computed[id_]:
            raise LawBroken("S2", f"request {id_} starts at {start}, not at {computed[id_]}")
        if id_ not in computed and start % before.config.block_size:
            raise LawBroken("S2", f"request {id_} starts inside a block")


# ---- events ------------------------------------------------------------------------------------------------------


def epochs_are_new(before: State, event: AnyEvent, after: State) -> None:
    """A2: a request that gives way comes back with the next epoch and with every token that it knew."""
    if not isinstance(event, StepPlanned) or not event.preempted:
        return
    queued = {entry.id: entry for entry in after.waiting}
    for row in event.preempted:
        id_, known, epoch = (int(field[row]) for field in (before.rows.id, before.rows.known, before.rows.epoch))
        entry = queued.get(id_)
        if entry is None or (entry.known, entry.epoch) != (known, epoch + 1):
            raise LawBroken("A2", f"request {id_} gave way with {known} tokens in epoch {epoch} and is queued as {entry}")


def arrivals_come_in_order(state: State) -> None:
    """L2: first come, first served: whoever runs came before all that wait, and rows stand in order of arrival."""
    if state.config.policy != "fcfs" or len(state.rows) == 0:
        return
    ids = state.rows.id.tolist()
    if ids != sorted(ids) or (state.waiting and ids[-1] > state.waiting[0].id):
        raise LawBroken("L2", f"requests {ids} run while {[entry.id for entry in state.waiting[:4]]} wait")


def tails_leave_first(before: State, gone: list[int], after: State) -> None:
    """P1: the end of a prefix is evicted before its beginning: of a request's freed blocks the last is queued first."""
    if len(gone) > 1:
        return  # two requests that end together may free a common prefix in either order
    table = row_blocks(before, gone[0])
    freed = table[(before.pool.ref[table] > 0) & (after.pool.ref[table] == 0)]
    if len(freed) > 1 and (np.diff(after.pool.place[freed]) >= 0).any():
        raise LawBroken("P1", f"blocks {freed.tolist()} were freed from the first to the last")


def endings_have_no_name(before: State, gone: list[int], after: State) -> None:
    """P1: the token that ends a request is in no named block: what the cache offers may not depend on the pipeline."""
    if len(after.pool.names) == 0:
        return
    rows, size = before.rows, before.config.block_size
    for row in gone:
        full = min(int(rows.computed[row]), int(rows.known[row])) // size
        for block in row_blocks(before, row)[full:].tolist():
            if after.pool.ref[block] == 0 and block in after.pool.names:
                raise LawBroken("P1", f"request {int(rows.id[row])} has left, and its unfinished block {block} has a name")
