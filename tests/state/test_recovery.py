"""An engine whose ranks die, and a request that goes on in another engine: the same tokens are asked for, in the same places."""

from __future__ import annotations

import pytest

from tests.core_drive import Engine, arrival_of
from vnext.sched.turn import steady_turn
from vnext.state.events import EngineRecovered, RequestResumed, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.feasibility import refusal

PROMPT = list(range(1, 10))


def recovered(engine: Engine, cautious: int = 0) -> None:
    engine.fold(EngineRecovered(cause="rank 0 was killed", cautious=cautious))


def resumed(id_: int, generated: list[int], max_tokens: int = 4) -> RequestResumed:
    arrival = arrival_of(id_, PROMPT, max_tokens)
    fields = {name: getattr(arrival, name) for name in arrival.__struct_fields__}
    return RequestResumed(**fields, generated=pack_tokens(generated))


@pytest.mark.parametrize("depth", [1, 2])
def test_running_requests_wait_again_with_their_tokens_and_no_page_holds_anything(depth):
    engine = Engine(pipeline_depth=depth)
    first, second = engine.arrive(PROMPT), engine.arrive([5, 6, 7])
    engine.step(token=33)
    engine.plan()
    planned = engine.state.planned

    recovered(engine)

    assert engine.running == [] and engine.waiting == [first, second]
    assert unpack_tokens(engine.state.waiting[0].tokens).tolist() == [*PROMPT, 33]
    assert engine.state.in_flight == () and engine.state.committed == engine.state.planned == planned
    assert engine.state.pool.free == engine.state.pool.page_count and engine.state.pool.kept == 0
    assert engine.plan() == {first: 10, second: 4}, "each computes all its tokens again: no page has them"
    assert engine.state.in_flight[0].step == planned


def test_a_resumed_request_asks_for_the_tokens_that_it_lacks():
    engine = Engine()
    engine.fold(resumed(0, [33, 34]))
    assert engine.plan() == {0: 11}
    assert [output.token for output in engine.commit(35)] == [35]
    engine.plan()
    assert [output.finish for output in engine.commit(36)] == ["length"]


def test_a_resumed_request_shares_the_blocks_of_its_tokens():
    engine = Engine()
    engine.fold(resumed(0, [33, 34, 35, 36], max_tokens=9))
    engine.step()
    engine.fold(resumed(1, [33, 34, 35, 36], max_tokens=9))
    assert engine.plan() == {0: 1, 1: 1}


def test_one_that_has_all_its_tokens_is_refused():
    engine = Engine()
    assert refusal(engine.state.config, resumed(0, [33])) is None
    assert "it has ended" in refusal(engine.state.config, resumed(0, [33, 34, 35, 36]))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cautious_state_admits_one_request_at_a_time(depth):
    engine = Engine(pipeline_depth=depth, max_num_batched_tokens=6)
    for _ in range(3):
        engine.arrive(PROMPT, max_tokens=20)
    recovered(engine, cautious=2)

    assert engine.plan() == {0: 6}
    assert engine.plan() == {}, "the next step waits for this one"
    engine.commit()
    assert engine.plan() == {0: 3}, "nobody joins while the first is in its prompt"
    engine.commit(33)
    assert engine.plan() == {0: 1, 1: 1}
    assert engine.state.cautious == 0, "request 2 arrived later"


def test_a_cautious_state_takes_no_steady_turn():
    engine = Engine(max_num_seqs=1)
    engine.arrive(PROMPT, max_tokens=20), engine.arrive(PROMPT)
    engine.step()
    recovered(engine, cautious=2)
    engine.plan()
    commit = StepCommitted(step=engine.state.committed, tokens=pack_tokens([33]))
    assert steady_turn(engine.state, commit, recorded=True) is None
