"""Strides are what `schedule` and `reduce` make of the same turns, and a queue is never kept waiting by mistake."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from vnext.sched import admission
from vnext.sched.ranking import places_best_first
from vnext.sched.schedule import schedule
from vnext.sched.sim.chance import Chance
from vnext.sched.sim.scenario import draw_clients, draw_config
from vnext.sched.stride import Samples, implementation, own_copy, stride
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.expected import expected_work
from vnext.state.keyframe import keyframe
from vnext.state.laws import check
from vnext.state.reduce import reduce, start
from vnext.state.refusal import refusal
from vnext.state.state import State

TURNS = 160

pytestmark = pytest.mark.skipif(implementation() == "none", reason="strides are not built here: no C compiler was found")


def begun(config: SchedulerConfig) -> State:
    return start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))


def arrivals(chance: Chance, config: SchedulerConfig) -> list[RequestArrived]:
    return [
        RequestArrived(id=0, name="", prompt=pack_tokens(client.prompt), sampling=client.sampling, priority=0, arrival_ns=0)
        for client in draw_clients(chance, config, 30)
        if client.prompt
    ]


def arrived(state: State, event: RequestArrived) -> State:
    event = replace(event, id=state.next_id, name=str(state.next_id))
    return state if refusal(state.config, event) else reduce(state, event)


def judged(state: State) -> None:
    """The short way to "nobody is admitted" and the trial agree."""
    config, work = state.config, expected_work(state.config, state.rows)
    room, budget = config.running_max - len(state.rows), config.batch_tokens_max - work.tokens_sum
    if room > 0 and budget > 0 and state.waiting and work.pages_sum <= state.pool.free:
        places = places_best_first(state, room)
        tried = admission._tried(state, places, budget, work.pages_sum)
        assert admission.admissions(state, work.tokens_sum, work.pages_sum) == tried


def plain(state: State, samples: Samples, turns: int, begun: bool) -> tuple[State, bytes | None]:
    """The same turns one event after the other, every plan the expected one; what was drawn for the one that is `begun`."""
    tokens = None
    for number in range(turns + begun):
        plan = schedule(state)
        assert not (plan.admitted or plan.preempted or plan.changed)
        state = reduce(state, plan)
        tokens = samples.draw(int(state.flights[0].samples.sum())).tobytes()
        if number < turns:
            state = reduce(state, StepCommitted(step=state.committed, tokens=tokens))
    return state, tokens if begun else None


@pytest.mark.parametrize("first", range(0, 24, 3))
def test_a_stride_is_its_turns(first):
    assert sum(map(strode, range(first, first + 3))) > 20


def strode(seed: int) -> int:
    """Turns that one seed's strides took, each compared."""
    chance = Chance(seed)
    config = replace(draw_config(chance), block_count=chance.choose([12, 40, 200]), windows=())
    coming, one, turns = arrivals(chance, config), begun(config), 0
    values = [chance.below(config.vocab_size or 64) for _ in range(chance.between(0, 60) + config.running_max)]
    expected, samples = (Samples(np.array(values, dtype="<i4")) for _ in range(2))
    other = own_copy(one)
    for _ in range(TURNS):
        if chance.happens(25):
            event = chance.choose(coming)
            one, other = arrived(one, event), arrived(other, event)
        judged(one)
        before = keyframe(one)
        found = stride(other, chance.between(1, 9), samples)
        assert keyframe(one) == before, "another owner of the history sees nothing"
        (one, tokens), other = plain(one, expected, found.turns, found.tokens is not None), found.state
        assert tokens == found.tokens and expected.at == samples.at
        assert keyframe(one) == keyframe(other)
        check(other)
        turns += found.turns
        one, other = usual_turn(one, found.tokens), usual_turn(other, found.tokens)
        assert keyframe(one) == keyframe(other)
    return turns


def test_a_stride_refuses_what_has_no_room():
    """Whatever is handed to the compiled turns is measured before anything is written."""
    config = SchedulerConfig(block_size=4, block_count=40, batch_tokens_max=64, running_max=4, model_len_max=64, vocab_size=9)
    event = next(event for event in arrivals(Chance(3), config) if not refusal(config, event))
    state = own_copy(reduce(arrived(begun(config), event), StepPlanned(step=0, admitted=((0, len(event.prompt) // 4),))))
    assert len(state.rows) == 1 and implementation() == "compiled"
    with pytest.raises(ValueError, match="too short for a stride"):
        stride(state, 5, Samples(np.empty(0, dtype="<i4")))


def usual_turn(state: State, tokens: bytes | None) -> State:
    if tokens is None:
        while (plan := schedule(state)) is not None:
            state = reduce(state, plan)
    if not state.flights:
        return state
    count = int(state.flights[0].samples.sum())
    return reduce(state, StepCommitted(step=state.committed, tokens=tokens or pack_tokens([5] * count)))
