"""Mischief: events that may not happen in a state, and plans that nobody would have decided.

The reducer must refuse the first and leave everything as it was. Of the second it may refuse what breaks a bound; what it
takes must be as lawful as any decision.
"""

from __future__ import annotations

from collections.abc import Callable

from vnext.sched.sim.chance import Chance
from vnext.sched.sim.laws import wanted
from vnext.sched.sim.snapshot import Snapshot
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.params import Sampling


def illegal_event(chance: Chance, seen: Snapshot) -> AnyEvent:
    """An event that no state like this one may take."""
    return chance.choose(ILLEGAL)(chance, seen)


def strange_plan(chance: Chance, seen: Snapshot) -> StepPlanned | None:
    """Some rows give way, some take less than they could, anybody is admitted; None where the pipeline is full.

    It keeps to the bound of a request's tokens a step, which is a decision's business, and mostly to the step's. Whether
    there are blocks for all of it is for the reducer to say.
    """
    state, config = seen.state, seen.state.config
    if len(state.flights) >= config.pipeline_depth:
        return None
    gone = [row for row in range(len(seen)) if chance.happens(10)]
    want, budget, changed = wanted(seen), config.batch_tokens_max, []
    for row, most in enumerate(want[row] for row in range(len(seen)) if row not in gone):
        tokens = max(min(most, budget), 0)
        tokens = chance.below(tokens + 1) if chance.happens(40) else tokens
        changed.append((row, tokens))
        budget -= tokens
    admitted: list[tuple[int, int]] = []
    for place, entry in enumerate(state.waiting if not gone else ()):
        most = min(config.prefill_threshold or entry.known, entry.known, budget)
        if most > 0 and len(seen) + len(admitted) < config.running_max and chance.happens(50):
            admitted.append((place, chance.between(1, most)))
            budget -= admitted[-1][1]
    if chance.happens(50):
        gone, admitted = gone[::-1], admitted[::-1]
    return StepPlanned(step=state.planned, preempted=tuple(gone), changed=tuple(changed), admitted=tuple(admitted))


# ---- what may not happen -----------------------------------------------------------------------------------------


def committed_at_another_time(chance: Chance, seen: Snapshot) -> AnyEvent:
    due = seen.state.committed if seen.flights else -1
    step = chance.choose([step for step in range(due - 2, seen.state.planned + 2) if step != due])
    return StepCommitted(step=step, tokens=pack_tokens([1] * chance.below(3)))


def committed_with_other_tokens(chance: Chance, seen: Snapshot) -> AnyEvent:
    """Too many, too few, half of one, or a negative one."""
    asked = len(seen.flights[0].owed) if seen.flights else 0
    data = [pack_tokens([1] * (asked + 1)), pack_tokens([1] * asked) + b"\x01"]
    if asked:
        data += [pack_tokens([1] * (asked - 1)), pack_tokens([1] * (asked - 1) + [-1])]
    return StepCommitted(step=seen.state.committed, tokens=chance.choose(data))


def planned_at_another_time(chance: Chance, seen: Snapshot) -> AnyEvent:
    step = seen.state.planned + chance.choose((-1, 1, 7))
    return StepPlanned(step=step, admitted=((0, 1),) if seen.state.waiting else ())


def planned_with_rows_that_are_not(chance: Chance, seen: Snapshot) -> AnyEvent:
    rows = len(seen)
    return chance.choose(
        (
            StepPlanned(step=seen.state.planned, preempted=(rows,)),
            StepPlanned(step=seen.state.planned, preempted=(-1,)),
            StepPlanned(step=seen.state.planned, preempted=(0, 0)),
            StepPlanned(step=seen.state.planned, changed=((rows, 1),)),
            StepPlanned(step=seen.state.planned, changed=((-1, 1),)),
        )
    )


def planned_with_wrong_tokens(chance: Chance, seen: Snapshot) -> AnyEvent:
    """A row takes more than it wants or less than nothing, or nobody takes anything."""
    state, row = seen.state, chance.below(len(seen) + 1)
    if row == len(seen):
        return StepPlanned(step=state.planned, changed=tuple((each, 0) for each in range(len(seen))))
    most = min(seen.known[row] + seen.pending[row], seen.limit[row] - 1) - seen.computed[row]
    return StepPlanned(step=state.planned, changed=((row, chance.choose((-1, most + 1))),))


def planned_with_wrong_admissions(chance: Chance, seen: Snapshot) -> AnyEvent:
    state, count = seen.state, len(seen.state.waiting)
    plans = [((count, 1),), ((-1, 1),)]
    if count:
        plans += [((0, 0),), ((0, -1),), ((0, state.waiting[0].known + 1),), ((0, 1), (0, 1))]
        plans.append(((0, state.config.batch_tokens_max + 1),))
    room = state.config.running_max - len(seen)
    if count > room:
        plans.append(tuple((place, 1) for place in range(room + 1)))
    return StepPlanned(step=state.planned, admitted=chance.choose(plans))


def arrived_wrongly(chance: Chance, seen: Snapshot) -> AnyEvent:
    """Another number than the next one, no prompt, half a token, no answer wanted, or more than anybody could serve."""
    due, far = seen.state.next_id, seen.state.config.model_len_max
    id_, prompt, wanted_tokens = chance.choose(
        ((due + 1, 1, 1), (due - 1, 1, 1), (due, 0, 1), (due, 1, 0), (due, far, 1), (due, 1, far), (due, -1, 1))
    )
    data = pack_tokens([1] * prompt) if prompt >= 0 else b"\x01\x00\x00"
    return RequestArrived(
        id=id_, name="nobody", prompt=data, sampling=Sampling(seed=0, max_tokens=wanted_tokens), priority=0, arrival_ns=0
    )


def aborted_before_it_came(chance: Chance, seen: Snapshot) -> AnyEvent:
    stranger = chance.choose((-1, seen.state.next_id, seen.state.next_id + 9))
    known = tuple(seen.id[:1]) if chance.happens(50) else ()
    return RequestAborted(ids=(*known, stranger), reason="client")


def started_again(chance: Chance, seen: Snapshot) -> AnyEvent:
    return EngineStarted(
        config=seen.state.config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0
    )


ILLEGAL: tuple[Callable[[Chance, Snapshot], AnyEvent], ...] = (
    committed_at_another_time, committed_with_other_tokens, planned_at_another_time, planned_with_rows_that_are_not,
    planned_with_wrong_tokens, planned_with_wrong_admissions, arrived_wrongly, aborted_before_it_came, started_again,
)  # fmt: skip
"""Each gives events that are illegal in every state."""
