"""Mischief: events that may not happen in a state, and plans that nobody would have decided.

The reducer must refuse the first and leave everything as it was. Of the second it may refuse what breaks a bound; what it
takes must be as lawful as any decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from vnext.sched.schedule import schedule
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
    """Another step than the next one, or one more than the pipeline holds."""
    full = len(seen.flights) >= seen.state.config.pipeline_depth
    step = seen.state.planned + (0 if full else chance.choose((-1, 1, 7)))
    return StepPlanned(step=step, admitted=((0, 1),) if seen.state.waiting and chance.happens(50) else ())


def decided_and_spoilt(chance: Chance, seen: Snapshot) -> AnyEvent:
    """The right plan with one thing wrong: nothing else can be the reason why it is refused."""
    plan = schedule(seen.state)
    if plan is None:
        return planned_at_another_time(chance, seen)
    ways = [list(wrong(plan, seen)) for wrong in (_wrong_rows, _wrong_tokens, _wrong_admissions, _wrong_admissions)]
    return replace(plan, **chance.choose(chance.choose(ways)))


def _wrong_rows(plan: StepPlanned, seen: Snapshot) -> Iterator[dict[str, tuple]]:
    """Rows that are not there, or twice."""
    gone = plan.preempted or (0,)
    yield from (dict(preempted=(*plan.preempted, row), admitted=()) for row in (len(seen), -1))
    yield dict(preempted=(*gone, gone[0]), admitted=())
    yield from (dict(changed=(*plan.changed, (row, 1))) for row in (len(seen), -1))


def _wrong_tokens(plan: StepPlanned, seen: Snapshot) -> Iterator[dict[str, tuple]]:
    """A row takes more than it wants or less than nothing, or nobody takes anything."""
    rest = [row for row in range(len(seen)) if row not in plan.preempted]
    yield dict(changed=tuple((row, 0) for row in range(len(rest))), admitted=())
    for place, row in enumerate(rest[:2]):
        most = min(seen.known[row] + seen.pending[row], seen.limit[row] - 1) - seen.computed[row]
        yield dict(changed=(*plan.changed, (place, -1)))
        yield dict(changed=(*plan.changed, (place, most + 1)))


def _wrong_admissions(plan: StepPlanned, seen: Snapshot) -> Iterator[dict[str, tuple]]:
    """Places that are not there or twice, no tokens or too many, more requests than the batch has room for."""
    count, room = len(seen.state.waiting), seen.state.config.running_max - len(seen)
    yield from (dict(admitted=(*plan.admitted, (place, 1))) for place in (count, -1))
    if plan.preempted or not count:
        return
    place = plan.admitted[0][0] if plan.admitted else 0
    yield dict(admitted=((place, 1), (place, 1)))
    others = [other for other in range(count) if other != place]
    if count > room:  # seldom refused for its number alone: there must be blocks for all of them
        yield from [dict(admitted=tuple((each, 1) for each in (place, *others)[: room + 1]))] * 4
    for wrong in (0, -1, seen.state.waiting[place].known + 1, seen.state.config.batch_tokens_max + 1):
        yield dict(admitted=((place, wrong), *plan.admitted[1:]))


def arrived_wrongly(chance: Chance, seen: Snapshot) -> AnyEvent:
    """Another number than the next one, no prompt, half a token, no answer wanted, or more than anybody could serve."""
    due, far = seen.state.next_id, seen.state.config.model_len_max
    id_, prompt, wanted_tokens = chance.choose(
        ((due + 1, 1, 1), (due - 1, 1, 1), (due, 0, 1), (due, 1, 0), (due, far, 1), (due, 1, far), (due, -1, 1))
    )
    data = pack_tokens([1] * prompt) if prompt >= 0 else b"\x01\x00\x00\x00\x00"
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
    decided_and_spoilt, decided_and_spoilt, decided_and_spoilt, planned_at_another_time, committed_at_another_time,
    committed_with_other_tokens, arrived_wrongly, aborted_before_it_came, started_again,
)  # fmt: skip
"""Each gives events that are illegal in every state; what is more likely stands here more often."""
