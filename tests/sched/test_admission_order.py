"""Who joins the batch, in which order, with how many tokens: budgets, bounds, chunks, thresholds, policies."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.sched.admission import kept_out


def test_first_come_first_served_when_all_fit() -> None:
    engine = Engine()
    for length in (3, 1, 2):
        engine.arrive([1] * length)
    assert list(engine.plan().items()) == [(0, 3), (1, 1), (2, 2)]
    assert engine.running == [0, 1, 2]


def test_running_requests_come_before_waiting_ones() -> None:
    engine = Engine(max_num_batched_tokens=6)
    engine.arrive([1] * 3)
    engine.step()
    engine.arrive([2] * 9)
    assert list(engine.plan().items()) == [(0, 1), (1, 5)]


def test_the_budget_is_spent_to_the_last_token_and_never_beyond() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.arrive([1] * 5, max_tokens=8)
    engine.arrive([2] * 20, max_tokens=8)
    engine.arrive([3] * 2, max_tokens=8)
    assert engine.step() == {0: 5, 1: 3}
    assert engine.step() == {0: 1, 1: 7}
    assert engine.step() == {0: 1, 1: 7}
    assert engine.step() == {0: 1, 1: 3, 2: 2}
    assert engine.step() == {0: 1, 1: 1, 2: 1}


def test_running_rows_behind_the_budget_wait_for_the_next_step() -> None:
    engine = Engine(max_num_batched_tokens=2)
    for _ in range(3):
        engine.arrive([1], max_tokens=3)
    assert engine.step() == {0: 1, 1: 1}
    assert engine.step() == {0: 1, 1: 1}
    assert engine.step() == {0: 1, 1: 1}  # both reach their limit
    assert engine.step() == {2: 1}


def test_the_batch_has_its_bound() -> None:
    engine = Engine(max_num_seqs=2)
    for _ in range(3):
        engine.arrive([1], max_tokens=2)
    assert engine.step() == {0: 1, 1: 1}
    assert engine.waiting == [2]
    assert engine.step() == {0: 1, 1: 1}
    assert engine.step() == {2: 1}


def test_a_threshold_bounds_each_request_s_chunk() -> None:
    engine = Engine(long_prefill_token_threshold=4)
    engine.arrive([1] * 10)
    engine.arrive([2] * 3)
    assert engine.step() == {0: 4, 1: 3}
    assert engine.step() == {0: 4, 1: 1}
    assert engine.step() == {0: 2, 1: 1}


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own_size() -> None:
    engine = Engine(chunked_prefill=False, max_num_batched_tokens=8)
    engine.arrive([1] * 5, max_tokens=2)
    engine.arrive([2] * 5, max_tokens=2)
    assert engine.step() == {0: 5}
    assert engine.step() == {0: 1, 1: 5}
    engine.run_out()
    assert engine.state.counters.finished == 2


def test_the_head_of_the_queue_is_never_passed_over() -> None:
    """Request 1 does not fit beside 0; request 2 would, and waits all the same."""
    engine = Engine(page_count=4, max_num_batched_tokens=16)
    engine.arrive([1] * 7, max_tokens=2)
    engine.arrive([2] * 12, max_tokens=2)
    engine.arrive([3], max_tokens=2)
    assert engine.step() == {0: 7}
    assert engine.waiting == [1, 2]
    assert engine.step() == {0: 1}
    assert engine.step() == {1: 12, 2: 1}


def test_priority_comes_before_arrival() -> None:
    engine = Engine(policy="priority", max_num_seqs=2)
    for priority in (2, 0, 1, 0):
        engine.arrive([1], priority=priority, max_tokens=1)
    assert engine.waiting == [0, 1, 2, 3], "the queue is in order of arrival; a policy is a matter of the decision"
    assert engine.decide().admitted == ((1, 1), (3, 1))
    assert list(engine.step()) == [1, 3]
    assert list(engine.step()) == [2, 0]


def test_first_come_ignores_priority() -> None:
    engine = Engine(max_num_seqs=1)
    engine.arrive([1], priority=5, max_tokens=1)
    engine.arrive([1], priority=0, max_tokens=1)
    assert list(engine.step()) == [0] and list(engine.step()) == [1]


def test_an_idle_engine_decides_nothing() -> None:
    engine = Engine()
    assert engine.decide() is None
    engine.arrive([1], max_tokens=1)
    engine.step()
    assert engine.decide() is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(13, 4, True), (14, 4, False), (16, 1, True), (17, 1, False), (1, 16, True)]
)
def test_the_largest_request_that_fits_is_served_and_the_next_is_refused(
    prompt: int, max_tokens: int, fits: bool
) -> None:
    """4 blocks of 4: the last token needs no place, because nothing is sampled after it."""
    from core_drive import arrival_of

    from vnext.state.feasibility import refusal

    engine = Engine(page_count=4)
    reason = refusal(engine.state.config, arrival_of(0, [1] * prompt, max_tokens))
    assert (reason is None) == fits
    if fits:
        engine.arrive([1] * prompt, max_tokens)
        engine.run_out()
        assert engine.state.counters.generated_tokens == max_tokens and engine.state.counters.preempted == 0


@pytest.mark.parametrize("budget, threshold, sure", [(5, 0, True), (6, 0, True), (4, 0, False), (5, 5, True), (5, 4, False)])
def test_a_request_that_the_cache_surely_cannot_hold_is_not_tried(budget: int, threshold: int, sure: bool) -> None:
    """Five tokens want two blocks and there is one: sure only if a step takes them all at once."""
    engine = Engine(long_prefill_token_threshold=threshold)
    engine.arrive([1, 2, 3, 4, 5])
    state = engine.state
    asked = (state.config, state.pool, state.waiting[0], budget)
    assert kept_out(*asked, free=1) is sure and kept_out(*asked, free=2) is False
