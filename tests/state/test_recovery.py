"""An engine whose ranks die, and a request that goes on in another engine: the same tokens are asked for, in the same places."""

from __future__ import annotations

import pytest
from core_drive import Engine, resumed_of

from vnext.sched.turn import steady_state
from vnext.state.events import StepCommitted, pack_tokens, unpack_tokens
from vnext.state.feasibility import refusal

PROMPT = list(range(1, 10))


@pytest.mark.parametrize("depth", [1, 2])
def test_running_requests_wait_again_with_their_tokens_and_no_page_holds_anything(depth):
    engine = Engine(pipeline_depth=depth)
    first, second = engine.arrive(PROMPT), engine.arrive([5, 6, 7])
    engine.step(token=33)
    engine.plan()
    planned = engine.state.planned

    engine.recover()

    assert engine.running == [] and engine.waiting == [first, second]
    assert unpack_tokens(engine.state.waiting[0].tokens).tolist() == [*PROMPT, 33]
    assert engine.state.in_flight == () and engine.state.committed == engine.state.planned == planned
    assert engine.state.pool.free == engine.state.pool.page_count and engine.state.pool.kept == 0
    assert engine.plan() == {first: 10, second: 4}, "each computes all its tokens again: no page has them"
    assert engine.state.in_flight[0].step == planned


def test_a_resumed_request_asks_for_the_tokens_that_it_lacks():
    engine = Engine()
    engine.fold(resumed_of(0, PROMPT, [33, 34]))
    assert engine.plan() == {0: 11}
    assert [output.token for output in engine.commit(35)] == [35]
    engine.plan()
    assert [output.finish for output in engine.commit(36)] == ["length"]


def test_a_resumed_request_shares_the_blocks_of_its_tokens():
    engine = Engine()
    engine.fold(resumed_of(0, PROMPT, [33, 34, 35, 36], max_tokens=9))
    engine.step()
    engine.fold(resumed_of(1, PROMPT, [33, 34, 35, 36], max_tokens=9))
    assert engine.plan() == {0: 1, 1: 1}


def test_one_that_has_all_its_tokens_is_refused():
    engine = Engine()
    assert refusal(engine.state.config, resumed_of(0, PROMPT, [33])) is None
    assert "it has ended" in refusal(engine.state.config, resumed_of(0, PROMPT, [33, 34, 35, 36]))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cautious_state_admits_one_request_at_a_time(depth):
    engine = Engine(pipeline_depth=depth, max_num_batched_tokens=6)
    for _ in range(3):
        engine.arrive(PROMPT, max_tokens=20)
    engine.recover(cautious=2)

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
    engine.recover(cautious=2)
    engine.plan()
    commit = StepCommitted(step=engine.state.committed, tokens=pack_tokens([33]))
    assert steady_state(engine.state, commit, recorded=True) is None


def test_caution_waits_for_those_that_are_still_to_come():
    """A new engine's clients may come one after the other; others join one at a time meanwhile."""
    engine = Engine()
    engine.recover(cautious=2, log="before")
    engine.fold(resumed_of(0, PROMPT, [33], max_tokens=20))
    engine.step()
    assert engine.state.cautious == 2
    engine.fold(resumed_of(1, PROMPT, [33], max_tokens=20))
    engine.arrive([5, 6, 7], max_tokens=20)
    assert engine.step() == {0: 1, 1: 2} and engine.state.cautious == 0
    assert engine.step() == {0: 1, 1: 1, 2: 3}


def test_nobody_is_cautious_for_ever():
    engine = Engine()
    engine.recover(cautious=2, log="before")
    for _ in range(2):
        engine.arrive(PROMPT, max_tokens=1)
    engine.run_out()
    assert engine.state.cautious == 0 and engine.state.counters.finished == 2


def test_a_recovery_in_a_recovery_changes_nothing_more():
    engine = Engine(pipeline_depth=2)
    for _ in range(3):
        engine.arrive(PROMPT)
    engine.step()
    engine.recover()
    once = engine.state
    engine.recover()
    assert engine.state.waiting == once.waiting and engine.state.planned == once.planned
    engine.run_out()
    assert engine.state.counters.finished == 3
