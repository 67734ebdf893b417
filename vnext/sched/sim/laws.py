"""Laws of a decision and of an event: what must hold between a state, what happened to it, and the state after.

The laws of a state alone are in vnext/state/laws.py. These need the state before as well, so they run in the simulator
and in tests, beside the code that decides. The order of the policies that it plays is spelled in order.py a second time,
so that a policy that is wrong is noticed too.
"""

from __future__ import annotations

from collections.abc import Iterable

from vnext.sched.sim.order import policy_keys
from vnext.sched.sim.snapshot import Snapshot, in_sight
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, RequestArrived, StepPlanned
from vnext.state.state import State, Waiting, blocks_for


def check_decision(before: State, plan: StepPlanned | None, after: State) -> None:
    """As `decision_laws`, for states of which nobody has snapshots."""
    decision_laws(Snapshot(before), plan, Snapshot(after))


def decision_laws(before: Snapshot, plan: StepPlanned | None, after: Snapshot) -> None:
    """All laws of one decision. Raises LawBroken."""
    if plan is None:
        work_is_conserved(before)
        return
    ranges_continue(before, after)
    budget_is_used(before, plan, after)
    nobody_is_passed_over(before, plan, after)
    if plan.preempted:
        victims_are_the_worst(before, plan)
        victims_are_needed(before, plan)


def event_laws(before: Snapshot, event: AnyEvent, after: Snapshot) -> None:
    """The laws of any one event. Raises LawBroken."""
    epochs_are_new(before, event, after)
    arrivals_come_in_order(after)
    if isinstance(event, RequestArrived) or before.id == after.id:
        return
    rows = [row for row, id_ in enumerate(before.id) if id_ not in after.id]
    if rows:
        later = given_back(after) if isinstance(event, StepPlanned) else set()
        tails_leave_first(before, rows, after, later)
        endings_have_no_name(before, rows, after, later)


# ---- decisions ---------------------------------------------------------------------------------------------------


def wanted(seen: Snapshot) -> list[int]:
    """Tokens that each row could take alone. The one at its limit is never computed: nothing is sampled after it."""
    config = seen.state.config
    most = config.prefill_threshold or config.model_len_max
    return [
        min(min(known + pending, limit - 1) - computed, most)
        for known, pending, limit, computed in zip(seen.known, seen.pending, seen.limit, seen.computed)
    ]


def served(seen: Snapshot, among: Iterable[int], any_budget: bool = False) -> tuple[list[int], int]:
    """What these rows take in order under the budget, and the pages they lack for it."""
    want, need, size = wanted(seen), 0, seen.state.config.block_size
    budget, tokens = sum(want) if any_budget else seen.state.config.batch_tokens_max, []
    for row in among:
        tokens.append(min(want[row], budget))
        budget -= tokens[-1]
        need += max(blocks_for(seen.computed[row] + tokens[-1], size) - seen.blocks[row], 0)
    return tokens, need * seen.state.config.group_count


def work_is_conserved(seen: Snapshot) -> None:
    """S6: whoever decides to do nothing has no place in the pipeline, or nothing that could be computed."""
    state = seen.state
    if not state.requests or len(state.flights) >= state.config.pipeline_depth:
        return
    if not state.flights:
        raise LawBroken("S6", f"{len(state.requests)} requests live and the decision is to do nothing")
    tokens, need = served(seen, range(len(seen)))
    if any(tokens) and need <= state.pool.free:
        raise LawBroken("S6", f"{sum(tokens)} tokens could be computed and the decision is to do nothing")
    if not any(tokens) and state.waiting and len(seen) < state.config.running_max:
        key_of = policy_keys(seen)
        _must_wait(seen, min(state.waiting, key=lambda entry: key_of[entry.id]), state.config.batch_tokens_max)


def budget_is_used(before: Snapshot, plan: StepPlanned, after: Snapshot) -> None:
    """S6: while budget remains, every row that stays takes all it may."""
    config, step = before.state.config, after.flights[-1]
    if plan.preempted or sum(step.counts) == config.batch_tokens_max:
        return  # who was served while somebody still held budget, and gave it back, may have taken less
    took = dict(zip(step.ids, step.counts))
    for id_, count in zip(before.id, wanted(before)):
        if took.get(id_, 0) != count:
            raise LawBroken("S6", f"request {id_} takes {took.get(id_, 0)} of {count} tokens, and budget remains")
    if not plan.admitted:
        return
    most, starts = config.prefill_threshold or config.model_len_max, dict(zip(step.ids, step.starts))
    for place, tokens in plan.admitted:
        waiting = before.state.waiting[place]
        if tokens != min(waiting.known - starts[waiting.id], most):
            raise LawBroken("S6", f"request {waiting.id} begins with {tokens} tokens, and budget remains")


def nobody_is_passed_over(before: Snapshot, plan: StepPlanned, after: Snapshot) -> None:
    """S3: admitted are the best of the queue by policy, best first, and the next one does not fit."""
    queue, config = before.state.waiting, before.state.config
    if not queue:
        return
    budget = config.batch_tokens_max - sum(after.flights[-1].counts)
    more = bool(after.state.waiting) and not plan.preempted and len(after) < config.running_max and budget > 0
    if not plan.admitted and not more:
        return
    key_of = policy_keys(before)
    best_first = sorted((entry.id for entry in queue), key=key_of.__getitem__)
    admitted = [queue[place].id for place, _ in plan.admitted]
    if admitted != best_first[: len(admitted)]:
        raise LawBroken("S3", f"admitted are the requests {admitted} where the best are {best_first[: len(admitted)]}")
    if more:
        _must_wait(after, min(after.state.waiting, key=lambda entry: key_of[entry.id]), budget, len(given_back(after)))


def given_back(seen: Snapshot) -> set[int]:
    """Pages that the newest plan, which has just been folded, gave back for good: its own requests could not take them."""
    config, step, found = seen.state.config, seen.flights[-1], set()
    start_of, size, groups = dict(zip(step.ids, step.starts)), config.block_size, config.group_count
    for id_, computed, table in zip(seen.id, seen.computed, seen.tables if config.windows else ()):
        for place, page in enumerate(table):
            group, last = place % groups, place // groups * size + size - 1
            if in_sight(config, group, last, start_of.get(id_, computed)) and not in_sight(config, group, last, computed):
                found.add(page)
    return {page for page in found if seen.holders[page] == 0}


def _must_wait(seen: Snapshot, best: Waiting, budget: int, too_late: int = 0) -> None:
    """S3 of one request. With the cache on it counts as fitting only if it fits whatever prefix the cache has of it.

    `too_late`: pages that became free after the decision.
    """
    config = seen.state.config
    tokens = min(best.known, config.prefill_threshold or best.known, budget)
    kept = (best.known - 1) // config.block_size if config.prefix_caching else 0
    whole = config.chunked_prefill or tokens == best.known
    if whole and (blocks_for(tokens, config.block_size) + kept) * config.group_count <= seen.state.pool.free - too_late:
        raise LawBroken("S3", f"request {best.id} waits and {tokens} of its tokens would fit")


def victims_are_the_worst(before: Snapshot, plan: StepPlanned) -> None:
    """S4: every row that gives way is worse than every row that stays; nobody is admitted in such a step."""
    key_of, ids = policy_keys(before), before.id
    best_victim = min(key_of[ids[row]] for row in plan.preempted)
    if plan.admitted or any(key_of[id_] > best_victim for row, id_ in enumerate(ids) if row not in plan.preempted):
        raise LawBroken("S4", f"rows {plan.preempted} give way while worse rows stay or others are admitted")


def victims_are_needed(before: Snapshot, plan: StepPlanned) -> None:
    """S4: without the last that gave way, the others could not have been served.

    Under another order than first-come a row's tokens depend on who held budget while it was served, so they count as
    served only if they were under any budget.
    """
    gone, holders, free = plan.preempted[:-1], before.holders.copy(), before.state.pool.free
    for row in gone:
        for block in before.held[row]:
            holders[block] -= 1
            free += holders[block] == 0
    stay = [row for row in range(len(before)) if row not in gone]
    if served(before, stay, before.state.config.policy != "fcfs")[1] <= free:
        raise LawBroken("S4", f"row {plan.preempted[-1]} gives way where {free} free blocks would have served everybody")


def ranges_continue(before: Snapshot, after: Snapshot) -> None:
    """S2: a running request's range starts where the last one ended; an admitted one's starts behind its hits."""
    step, size = after.flights[-1], before.state.config.block_size
    computed, ends = dict(zip(before.id, before.computed)), dict(zip(after.id, after.computed))
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        if start + count != ends[id_]:
            raise LawBroken("S2", f"request {id_} computes up to {start + count} and counts {ends[id_]}")
        if id_ in computed and start != computed[id_]:
            raise LawBroken("S2", f"request {id_} starts at {start}, not at {computed[id_]}")
        if id_ not in computed and start % size:
            raise LawBroken("S2", f"request {id_} starts inside a block")


# ---- events ------------------------------------------------------------------------------------------------------


def epochs_are_new(before: Snapshot, event: AnyEvent, after: Snapshot) -> None:
    """A2: a request that gives way comes back with the next epoch and with every token that it knew."""
    if not isinstance(event, StepPlanned) or not event.preempted:
        return
    queued = {entry.id: entry for entry in after.state.waiting}
    for row in event.preempted:
        id_, known, epoch = before.id[row], before.histories[row], before.epoch[row]
        entry = queued.get(id_)
        if entry is None or (entry.tokens, entry.epoch) != (known, epoch + 1):
            knew = f"request {id_} gave way with {len(known) // 4} tokens in epoch {epoch}"
            raise LawBroken("A2", f"{knew} and is queued as {entry}")


def arrivals_come_in_order(seen: Snapshot) -> None:
    """L2: first come, first served: whoever runs came before all that wait, and rows stand in order of arrival."""
    if seen.state.config.policy != "fcfs" or not seen.id:
        return
    ids, queue = seen.id, seen.state.waiting
    if ids != sorted(ids) or (queue and ids[-1] > queue[0].id):
        raise LawBroken("L2", f"requests {ids} run while {[entry.id for entry in queue[:4]]} wait")


def tails_leave_first(before: Snapshot, gone: list[int], after: Snapshot, later: set[int]) -> None:
    """P1: the end of a prefix is evicted before its beginning: of a request's freed blocks the last is queued first.

    `later`: pages that others held a little longer, until they gave them back.
    """
    if len(gone) > 1:
        return  # two requests that end together may free a common prefix in either order
    freed = [block for block in before.held[gone[0]] if before.holders[block] > 0 and after.holders[block] == 0]
    freed = [block for block in freed if block not in later]
    places = [after.places[block] for block in freed]
    if any(place <= behind for place, behind in zip(places, places[1:])):
        raise LawBroken("P1", f"blocks {freed} were freed from the first to the last")


def endings_have_no_name(before: Snapshot, gone: list[int], after: Snapshot, later: set[int]) -> None:
    """P1: the token that ends a request is in no named block: what the cache offers may not depend on the pipeline.

    `later`: pages that others may have taken, filled, named and given back in the same plan.
    """
    names, size, groups = after.state.pool.names, before.state.config.block_size, before.state.config.group_count
    if len(names) == 0:
        return
    for row in gone:
        full = min(before.computed[row], before.known[row]) // size
        for block in set(before.tables[row][full * groups :]).intersection(before.held[row]):
            if after.holders[block] == 0 and names.key_of(block) is not None and block not in later:
                raise LawBroken("P1", f"request {before.id[row]} has left, and its unfinished block {block} has a name")
