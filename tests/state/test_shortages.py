"""Memory that runs short, as events: who keeps what, which names go, and by how much a step shrinks and grows again."""

from __future__ import annotations

import numpy as np
import pytest
from core_drive import Engine

from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.sched.schedule import schedule
from vnext.sched.shortage import SUFFICED, SUFFICED_MAX, is_stuck, patience, raised, ran_short
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import MemoryRanShort, StepLimitRaised
from vnext.state.laws import check
from vnext.state.pool import free_blocks, pinned_count
from vnext.state.state import State


def lack(engine: Engine) -> State:
    return engine.fold(ran_short(engine.state, "rank 0 lacks memory"))


def named(engine: Engine) -> int:
    return len(engine.state.pool.prefix_index)


def test_what_was_computed_keeps_its_names_and_what_was_not_has_none() -> None:
    engine = Engine(block_size=4, pipeline_depth=3, max_num_batched_tokens=8)
    first = engine.arrive([1] * 20, max_tokens=4)
    engine.step()  # 8 tokens: two blocks
    engine.plan(), engine.plan()  # and three more that no rank computes
    assert named(engine) == 5
    state = lack(engine)
    assert (named(engine), engine.running, engine.waiting, state.in_flight) == (2, [first], [], ())
    assert (state.committed, state.planned) == (3, 3) and state.counters.preempted == 0
    assert (state.rows.computed.tolist(), state.rows.blocks.tolist(), state.rows.preemption_count.tolist()) == ([8], [2], [1])
    assert (state.config.max_num_batched_tokens, state.lowered_from) == (4, 8)
    assert engine.plan() == {first: 4} and engine.state.in_flight[-1].starts.tolist() == [8]


def test_a_block_that_a_commit_named_and_no_step_completed_has_no_name() -> None:
    """The token is known before the step that computes it has run."""
    engine = Engine(block_size=4, pipeline_depth=2)
    engine.arrive([1] * 3, max_tokens=5)
    engine.plan(), engine.plan()
    engine.commit(7)
    assert named(engine) == 1 and engine.state.rows.computed.tolist() == [4]
    lack(engine)
    assert named(engine) == 0


def test_rows_go_back_to_what_was_computed_without_the_steps_in_flight() -> None:
    """Who decodes keeps a block that is not full; who hits a block that was to be written goes back before it; whose prompt is scored
    begins anew."""
    engine = Engine(block_size=4, pipeline_depth=3, max_num_batched_tokens=40)
    decodes, scored = engine.arrive([1] * 5), engine.arrive([2] * 6, prompt_logprobs=1)
    engine.step()
    first = engine.arrive([3] * 9)
    engine.plan()
    second = engine.arrive([3] * 9)
    engine.plan(), engine.plan()
    before = engine.state.rows
    assert engine.running == [decodes, scored, first, second] and before.computed.tolist() == [8, 9, 11, 10]
    state = lack(engine)
    assert engine.running == [decodes, scored, first, second] and not engine.waiting
    assert state.rows.computed.tolist() == [5, 0, 0, 0] and state.rows.blocks.tolist() == [2, 0, 0, 0]
    assert state.rows.placeholders.tolist() == [0] * 4 and len(free_blocks(state.pool)) == 14
    check(state)
    engine.run_out()


def test_an_engine_whose_every_second_step_lacks_memory_comes_to_an_end() -> None:
    engine = Engine(block_size=4, pipeline_depth=2, max_num_batched_tokens=16)
    for number in range(3):
        engine.arrive([number + 1] * 9, max_tokens=6)
    for turn in range(400):
        engine.plan()
        if not engine.state.in_flight:
            break
        if turn % 2:
            lack(engine)
        else:
            engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    assert not engine.state.requests and turn < 150


@pytest.mark.parametrize("leaves", [True, False])
def test_where_a_request_has_left_that_may_have_named_a_block_nothing_is_a_hit(leaves: bool) -> None:
    engine = Engine(block_size=4, pipeline_depth=2, max_num_batched_tokens=16)
    engine.arrive([2] * 8, max_tokens=1)
    engine.step()
    gone, _ = engine.arrive([1] * 9), engine.arrive([3] * 3)
    engine.plan()
    assert named(engine) == 4
    if leaves:
        engine.abort(gone)
    lack(engine)
    assert named(engine) == (0 if leaves else 2)


@pytest.mark.parametrize("changes", [{"windows": (4,)}, {"state_pages": 12, "snapshot_interval": 4}])
def test_where_pages_are_given_back_or_written_in_place_nothing_is_a_hit(changes: dict[str, object]) -> None:
    engine = Engine(block_size=4, pipeline_depth=2, **changes)
    engine.arrive([1] * 9)
    engine.step(), engine.plan()
    lack(engine)
    assert named(engine) == 0
    engine.run_out()


def test_pins_end_where_all_names_go() -> None:
    engine = Engine(block_size=4, pipeline_depth=2, pinned_kv_fraction=0.5)
    engine.arrive([1] * 9, max_tokens=1, retention=((8, 60),))
    engine.step()
    gone = engine.arrive([2] * 9)
    engine.plan()
    assert pinned_count(engine.state.pool) == 2
    engine.abort(gone)
    lack(engine)
    assert pinned_count(engine.state.pool) == 0 == named(engine)


def test_a_limit_is_halved_and_doubled_until_it_is_what_it_was() -> None:
    engine = Engine(max_num_batched_tokens=9)
    engine.arrive([1] * 30, max_tokens=3)
    limits = []
    for _ in range(5):
        engine.plan()
        limits.append((is_stuck(engine.state), lack(engine).config.max_num_batched_tokens))
    assert limits == [(False, 4), (False, 2), (False, 1), (True, 1), (True, 1)]
    calm = digest(engine.state)
    for expected in (2, 4, 8, 9):
        assert engine.state.lowered_from == 9
        assert engine.fold(raised(engine.state)).config.max_num_batched_tokens == expected
    assert engine.state.lowered_from == 0 and digest(engine.state) != calm
    engine.run_out()


def test_whole_prompts_are_not_cut() -> None:
    engine = Engine(chunked_prefill=False, max_num_batched_tokens=16)
    engine.arrive([1] * 12, max_tokens=3)
    engine.plan()
    assert is_stuck(engine.state) and lack(engine).lowered_from == 0
    engine.run_out()


def test_a_lowered_state_is_loaded_as_it_was() -> None:
    engine = Engine(max_num_batched_tokens=16)
    started = engine.state.config
    engine.arrive([1] * 40, max_tokens=3)
    engine.plan()
    lack(engine)
    loaded = load(decode(encode(snapshot(engine.state), 2)), started)
    assert (loaded.config, loaded.lowered_from, digest(loaded)) == (engine.state.config, 16, digest(engine.state))
    assert schedule(loaded) == schedule(engine.state)


def test_what_may_not_happen_is_refused() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.arrive([1] * 12, max_tokens=3)
    with pytest.raises(IllegalEvent, match="not the oldest in flight"):
        engine.fold(MemoryRanShort(step=0, limit=1, cause="why"))
    engine.plan()
    for event, why in (
        (MemoryRanShort(step=1, limit=1, cause="why"), "not the oldest"), (MemoryRanShort(step=0, limit=7, cause="why"), "1 to 6"),
        (MemoryRanShort(step=0, limit=0, cause="why"), "1 to 6"), (MemoryRanShort(step=0, limit=1, cause=""), "without a cause"),
        (StepLimitRaised(limit=17), "at most 0"), (StepLimitRaised(limit=16), "16 now"),
    ):  # fmt: skip
        with pytest.raises(IllegalEvent, match=why):
            engine.fold(event)


def test_a_raise_that_was_too_early_waits_twice_as_long() -> None:
    assert patience(SUFFICED, False) == SUFFICED and patience(SUFFICED, True) == 2 * SUFFICED
    assert patience(SUFFICED_MAX, True) == SUFFICED_MAX and patience(SUFFICED_MAX, False) == SUFFICED
    assert np.log2(SUFFICED_MAX / SUFFICED) == 7
