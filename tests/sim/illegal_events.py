"""Illegal events, and strange plans that the scheduler would not decide.

Those of a feature stand beside its fold (vnext/state/facilities). The reducer must refuse an illegal event and change nothing. It
may refuse a strange plan that breaks a bound; a plan that it accepts must be as lawful as any decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypedDict

import numpy as np
from msgspec.structs import replace

from vnext.sched.schedule import schedule
from vnext.sim.checks.fitting import wanted
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.drafts import draft_room
from vnext.sim.rng import Rng
from vnext.state.allocate import hit_tokens_of, prefix_hits
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    RequestAborted,
    RequestArrived,
    RequestId,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.expected import begun, is_encoded
from vnext.state.params import Sampling
from vnext.state.state import State
from vnext.state.store.fields import DIGEST_WORDS
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens, with_rows


class Changes(TypedDict, total=False):
    """The fields of a plan that differ from the decision."""

    preempted: tuple[int, ...]
    changed: tuple[tuple[int, int], ...]
    admitted: tuple[tuple[int, int], ...]


def illegal_event(rng: Rng, seen: PlainState) -> AnyEvent:
    """An event that no state like this one may take. Where drafts are in flight, it is often about them."""
    if seen.in_flight and sum(seen.in_flight[0].drafts) and rng.happens(60):
        return _committed_with_other_drafts(rng, seen)
    return rng.choose(ILLEGAL)(rng, seen)


def strange_plan(rng: Rng, seen: PlainState) -> StepPlanned | None:
    """A plan that preempts some rows, gives some fewer tokens, and admits any request; None if the pipeline is full.

    It respects the limit of a request's tokens in a step, which only a decision must respect, and usually that of the
    step. The reducer decides whether there are enough pages.
    """
    state, config = seen.state, seen.state.config
    if len(state.in_flight) >= config.pipeline_depth:
        return None
    gone = [row for row in range(len(seen)) if rng.happens(10)]
    want, budget, changed = wanted(seen)[0], config.max_num_batched_tokens, []
    room = [0 if gone else most for most in draft_room(seen)]
    for row, most in enumerate(want[row] for row in range(len(seen)) if row not in gone):
        tokens = max(min(most, budget), 0)
        tokens = rng.below(tokens + 1) if rng.happens(40) else tokens
        if tokens == most == 1 and room[row] and budget > 1:
            tokens += rng.below(min(room[row], budget - 1) + 1)
        changed.append((row, tokens))
        budget -= tokens
    admitted: list[tuple[int, int]] = []
    for place, entry in enumerate(state.waiting if not gone else ()):
        most = min(config.long_prefill_token_threshold or entry.known, entry.known, budget)
        if most > 0 and len(seen) + len(admitted) < config.max_num_seqs and rng.happens(50):
            admitted.append((place, rng.between(1, most)))
            budget -= admitted[-1][1]
    if rng.happens(50):
        gone, admitted = gone[::-1], admitted[::-1]
    return StepPlanned(step=state.planned, preempted=tuple(gone), changed=tuple(changed), admitted=tuple(admitted))


def early_inputs(state: State) -> Iterator[StepPlanned]:
    """Plans that begin the first waiting request's next input before its last unit; also without its hits, which rows may evict."""
    for entry in state.waiting[:1] if state.config.input_units else ():
        start = hit_tokens_of(state.config, prefix_hits(state.config, state.pool, entry))
        tokens = np.frombuffer(entry.tokens, np.int32)
        for place in begun(tokens, start, len(tokens) - start, is_new=True)[:1]:
            count = 1 + (place if len(state.rows) else max(place - start, 0))
            if not is_encoded(state, entry.id, place) and start + count <= len(tokens):
                yield StepPlanned(step=state.planned, admitted=((0, count),))


# ---- what may not happen -----------------------------------------------------------------------------------------


def committed_at_another_time(rng: Rng, seen: PlainState) -> AnyEvent:
    due = seen.state.committed if seen.in_flight else -1
    step = rng.choose([step for step in range(due - 2, seen.state.planned + 2) if step != due])
    return StepCommitted(step=step, tokens=pack_tokens([1] * rng.below(3)))


def committed_with_other_tokens(rng: Rng, seen: PlainState) -> AnyEvent:
    """Too many tokens, too few, half of one, or a negative one."""
    asked = len(seen.in_flight[0].owed) if seen.in_flight else 0
    data = [pack_tokens([1] * (asked + 1)), pack_tokens([1] * asked) + b"\x01"]
    if asked:
        data += [pack_tokens([1] * (asked - 1)), pack_tokens([1] * (asked - 1) + [-1])]
    return StepCommitted(step=seen.state.committed, tokens=rng.choose(data))


def _committed_with_other_drafts(rng: Rng, seen: PlainState) -> AnyEvent:
    """More drafts than were planned, more tokens kept than there were drafts, none at all, or too few numbers."""
    step = seen.in_flight[0]
    drafts = [count for count, samples in zip(step.drafts, step.samples) if samples]
    counts, drafted = rng.choose(
        (
            ([1] * len(drafts), [count + 1 for count in drafts]),
            ([1] * len(drafts), [count + 1 for count in drafts]),
            ([count + 2 for count in drafts], drafts),
            ([0] * len(drafts), drafts),
            ([1] * (len(drafts) - 1), drafts),
            ([1] * len(drafts), [*drafts, 0]),
        )
    )
    tokens = pack_tokens([1] * sum(counts))
    return StepCommitted(step=step.step, tokens=tokens, counts=bytes(counts), drafted=bytes(drafted))


def planned_at_another_time(rng: Rng, seen: PlainState) -> AnyEvent:
    """Another step than the next one, or one more than the pipeline holds."""
    full = len(seen.in_flight) >= seen.state.config.pipeline_depth
    step = seen.state.planned + (0 if full else rng.choose((-1, 1, 7)))
    return StepPlanned(step=step, admitted=((0, 1),) if seen.state.waiting and rng.happens(50) else ())


def decided_and_spoilt(rng: Rng, seen: PlainState) -> AnyEvent:
    """The right plan with one fault, which must be the reason for its refusal."""
    plan = schedule(seen.state)
    if plan is None:
        return planned_at_another_time(rng, seen)
    ways = [list(wrong(plan, seen)) for wrong in (_wrong_rows, _wrong_tokens, _wrong_admissions, _wrong_admissions)]
    return replace(plan, **rng.choose(rng.choose(ways)))


def _wrong_rows(plan: StepPlanned, seen: PlainState) -> Iterator[Changes]:
    """Rows that do not exist, or appear twice."""
    gone = plan.preempted or (0,)
    yield from (Changes(preempted=(*plan.preempted, row), admitted=()) for row in (len(seen), -1))
    yield Changes(preempted=(*gone, gone[0]), admitted=())
    yield from (Changes(changed=(*plan.changed, (row, 1))) for row in (len(seen), -1))


def _wrong_tokens(plan: StepPlanned, seen: PlainState) -> Iterator[Changes]:
    """A row takes more than it wants or a negative number, or no row takes anything."""
    rest, room = [row for row in range(len(seen)) if row not in plan.preempted], draft_room(seen)
    yield Changes(changed=tuple((row, 0) for row in range(len(rest))), admitted=())
    for place, row in enumerate(rest[:2]):
        most = min(seen.rows.known[row] + seen.rows.placeholders[row], seen.rows.limit[row] - 1) - seen.rows.computed[row]
        yield Changes(changed=(*plan.changed, (place, -1)))
        yield Changes(changed=(*plan.changed, (place, most + (0 if plan.preempted else room[row]) + 1)))


def _wrong_admissions(plan: StepPlanned, seen: PlainState) -> Iterator[Changes]:
    """Places that are not there or twice, no tokens or too many, more requests than the batch has room for."""
    count, room = len(seen.state.waiting), seen.state.config.max_num_seqs - len(seen)
    yield from (Changes(admitted=(*plan.admitted, (place, 1))) for place in (count, -1))
    if plan.preempted or not count:
        return
    place = plan.admitted[0][0] if plan.admitted else 0
    yield Changes(admitted=((place, 1), (place, 1)))
    others = [other for other in range(count) if other != place]
    if count > room:  # seldom refused for its number alone: there must be blocks for all of them
        yield from [Changes(admitted=tuple((each, 1) for each in (place, *others)[: room + 1]))] * 4
    for wrong in (0, -1, seen.state.waiting[place].known + 1, seen.state.config.max_num_batched_tokens + 1):
        yield Changes(admitted=((place, wrong), *plan.admitted[1:]))


def arrived_wrongly(rng: Rng, seen: PlainState) -> AnyEvent:
    """Another number than the next one, no prompt, half a token, input or row, no answer wanted or a wrong weight, or more than
    anybody could serve."""
    due, far = seen.state.next_id, seen.state.config.max_model_len
    id_, prompt, wanted_tokens = rng.choose(
        ((due + 1, 1, 1), (due - 1, 1, 1), (due, 0, 1), (due, 1, 0), (due, far, 1), (due, 1, far), (due, -1, 1), (due, -2, 1))
    )
    weight = 1
    if not wanted_tokens and due % 2:
        wanted_tokens, weight = 1, 101 * (due % 4 == 1)
    uneven = input_tokens(with_rows(bytes(DIGEST_SIZE), 3), DIGEST_WORDS).tobytes()
    torn = uneven if seen.state.config.grids else uneven[:-4]
    data = pack_tokens([1] * prompt) if prompt >= 0 else torn if prompt == -2 else b"\x01\x00\x00\x00\x00"
    return RequestArrived(
        id=RequestId(id_),
        name="nobody",
        prompt=data,
        sampling=Sampling(seed=0, max_tokens=wanted_tokens),
        priority=0,
        arrival_ns=0,
        weight=weight,
    )


def resumed_wrongly(rng: Rng, seen: PlainState) -> AnyEvent:
    """All that it wanted, more, half a token, or a last token that ended it."""
    wanted_tokens, generated, stops = rng.choose(
        ((1, pack_tokens([1]), ()), (2, pack_tokens([1, 1, 1]), ()), (2, b"\x01\x00", ()), (3, pack_tokens([1, 5]), (5,)))
    )
    return RequestResumed(
        id=RequestId(seen.state.next_id),
        name="nobody",
        prompt=pack_tokens([1]),
        sampling=Sampling(seed=0, max_tokens=wanted_tokens, stop_token_ids=stops),
        priority=0,
        arrival_ns=0,
        generated=generated,
    )


def recovered_wrongly(rng: Rng, seen: PlainState) -> AnyEvent:
    """Behind another engine's log in the middle of one's own, behind fewer frames than none, or cautious below nobody."""
    if seen.state.sequence > 1 and rng.happens(50):
        return EngineRecovered(cause="", log="another", frames=7)
    return rng.choose((EngineRecovered(cause="", frames=-1), EngineRecovered(cause="", cautious=-1)))


def aborted_before_it_came(rng: Rng, seen: PlainState) -> AnyEvent:
    stranger = RequestId(rng.choose((-1, seen.state.next_id, seen.state.next_id + 9)))
    known = tuple(map(RequestId, seen.rows.id[:1])) if rng.happens(50) else ()
    return RequestAborted(ids=(*known, stranger), reason="client")


def started_again(rng: Rng, seen: PlainState) -> AnyEvent:
    return EngineStarted(
        config=seen.state.config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0
    )


ILLEGAL: tuple[Callable[[Rng, PlainState], AnyEvent], ...] = (
    decided_and_spoilt, decided_and_spoilt, decided_and_spoilt, planned_at_another_time, committed_at_another_time,
    committed_with_other_tokens, arrived_wrongly, aborted_before_it_came, started_again,
    resumed_wrongly, recovered_wrongly,
)  # fmt: skip
"""Each gives events that are illegal in every state; what is more likely stands here more often."""
