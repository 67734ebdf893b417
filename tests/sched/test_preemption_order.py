"""Who gives way, when, what is kept, and that everybody ends all the same."""

from __future__ import annotations

import pytest
from core_drive import Engine, check_decision
from msgspec.structs import replace

from vnext.state.errors import LawBroken


def crowded(**changes) -> Engine:
    """Three requests of two blocks each in a pool of 6 blocks of 2; each needs a third block in the next step."""
    engine = Engine(**(dict(block_size=2, page_count=6, max_num_batched_tokens=16, prefix_caching=False) | changes))
    for priority in (0, 2, 1):
        engine.arrive([1 + priority] * 4, max_tokens=6, priority=priority)
    assert engine.step() == {0: 4, 1: 4, 2: 4}
    assert engine.free == 0
    return engine


def test_the_last_come_gives_way() -> None:
    engine = crowded()
    plan = engine.decide()
    assert plan.preempted == (2,)
    assert engine.plan() == {0: 1, 1: 1}
    assert engine.waiting == [2] and engine.running == [0, 1]


def test_the_worst_priority_gives_way() -> None:
    engine = crowded(policy="priority")
    assert engine.running == [0, 2, 1], "admitted by priority"
    assert engine.plan() == {0: 1, 2: 1}
    assert engine.waiting == [1]


def test_among_equal_priorities_the_last_come_gives_way() -> None:
    engine = Engine(block_size=2, page_count=6, policy="priority", prefix_caching=False)
    for _ in range(3):
        engine.arrive([1] * 4, max_tokens=6, priority=1)
    engine.step()
    assert engine.plan() == {0: 1, 1: 1} and engine.waiting == [2]


def test_a_row_that_was_served_already_may_give_way() -> None:
    """Priority: the first row in running order is the worst; its tokens and blocks are handed back."""
    engine = Engine(block_size=2, page_count=4, policy="priority", prefix_caching=False)
    engine.arrive([1] * 4, max_tokens=4, priority=9)
    engine.step()
    engine.arrive([2] * 2, max_tokens=6, priority=0)
    assert engine.step() == {0: 1, 1: 2}
    assert engine.free == 0 and engine.running == [0, 1]
    assert engine.plan() == {1: 1}
    assert engine.waiting == [0] and engine.state.waiting[0].known == 6


def test_a_preempted_request_returns_to_the_head_and_keeps_its_tokens() -> None:
    engine = crowded()
    engine.arrive([9])
    engine.step()
    assert engine.waiting == [2, 3]
    entry = engine.state.waiting[0]
    assert entry.tokens == b"".join(token.to_bytes(4, "little") for token in (2, 2, 2, 2, 9))
    assert entry.preemption_count == 1 and engine.state.counters.preempted == 1


def test_preempted_requests_come_back_in_their_order() -> None:
    engine = Engine(block_size=1, page_count=4, max_num_batched_tokens=16, prefix_caching=False)
    for _ in range(4):
        engine.arrive([1], max_tokens=4)
    assert engine.step() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert engine.decide().preempted == (3, 2)
    engine.step()
    assert engine.waiting == [2, 3] and engine.running == [0, 1]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    engine = crowded()
    engine.arrive([1], max_tokens=1)
    plan = engine.decide()
    assert plan.preempted and not plan.admitted


def test_kept_blocks_go_before_running_requests() -> None:
    """Content that nobody holds is evicted first; nobody gives way for the cache's sake."""
    engine = Engine(block_size=2, page_count=6)
    engine.arrive([5] * 8, max_tokens=1)
    engine.run_out()
    engine.arrive([1] * 4, max_tokens=8)
    engine.run_out()
    assert engine.state.counters.preempted == 0


def test_a_shared_prefix_survives_its_first_holder() -> None:
    engine = Engine(block_size=2, page_count=6)
    engine.arrive([1] * 5, max_tokens=4)
    engine.arrive([1] * 5, max_tokens=4)
    engine.step()
    shared = engine.blocks(0)[:2]
    engine.abort(0)
    assert engine.blocks(1)[:2] == shared and engine.state.pool.ref[shared].tolist() == [1, 1]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """With the cache on, what was computed before the preemption is hit unless it was evicted meanwhile."""
    engine = Engine(block_size=2, page_count=7, max_num_batched_tokens=16)
    for token in (1, 2, 3):
        engine.arrive([token] * 4, max_tokens=4)
    engine.step()
    hits = engine.state.counters.prefix_hit_tokens
    while not engine.state.counters.preempted:
        engine.step()
    engine.run_out()
    assert engine.state.counters.finished == 3 and engine.free == 7
    assert engine.state.counters.prefix_hit_tokens > hits


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_any_crowd_ends(policy: str, depth: int, caching: bool) -> None:
    """Twenty requests that each may fill the whole pool."""
    engine = Engine(
        block_size=1, page_count=12, max_num_seqs=8, max_num_batched_tokens=5, policy=policy, pipeline_depth=depth,
        prefix_caching=caching,
    )  # fmt: skip
    for number in range(20):
        engine.arrive([1 + number % 3] * (1 + number % 6), max_tokens=7, priority=number % 3)
    for _ in range(3_000):
        while engine.plan():
            pass
        if not engine.state.requests:
            break
        engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    while engine.state.in_flight:
        engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    assert engine.state.counters.finished == 20 and engine.state.counters.preempted > 0
    assert engine.free == 12 and engine.state.counters.generated_tokens == 140


def test_first_come_first_finished_under_pressure() -> None:
    """No starvation: with equal work the requests end in the order in which they came, preempted or not."""
    engine = Engine(block_size=1, page_count=10, max_num_seqs=6, max_num_batched_tokens=8, prefix_caching=False)
    for _ in range(10):
        engine.arrive([1, 2], max_tokens=6)
    ended: list[int] = []
    while engine.state.requests:
        engine.plan()
        news = engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
        ended += [item.id for item in news if item.finish]
    assert ended == list(range(10)) and engine.state.counters.preempted > 0


def squeezed() -> Engine:
    """Budget and blocks run out in the same step; the first row is the worst."""
    engine = Engine(
        block_size=1,
        page_count=9,
        max_num_batched_tokens=4,
        long_prefill_token_threshold=2,
        policy="priority",
        prefix_caching=False,
    )
    for prompt, priority, max_tokens in ((1, 9, 8), (8, 0, 1), (8, 0, 1)):
        engine.arrive([1] * prompt, max_tokens, priority=priority)
        taken = engine.step()
    assert taken == {0: 1, 1: 2, 2: 1} and engine.free == 1
    return engine


def test_what_a_victim_was_given_is_handed_back() -> None:
    """The first row is served, then gives way: its token is all that lets the last one compute two instead of one."""
    engine = squeezed()
    before, plan = engine.state, engine.decide()
    assert plan.preempted == (0,)
    assert engine.plan() == {1: 2, 2: 2}
    check_decision(before, plan, engine.state)


def test_the_law_of_the_budget_sees_a_token_that_is_lost_in_a_preemption() -> None:
    """S6: the same step, but the last row is planned with the one token that it would get without the victim's."""
    engine = squeezed()
    before, plan = engine.state, replace(engine.decide(), changed=((1, 1),))
    engine.fold(plan)
    with pytest.raises(LawBroken, match="S6.* request 2 takes 1 tokens where 2 are its share"):
        check_decision(before, plan, engine.state)


def test_a_prompt_is_counted_once_however_often_it_is_computed() -> None:
    engine = crowded()
    engine.run_out()
    counters = engine.state.counters
    assert counters.preempted > 0 and counters.prompt_tokens == 12 and counters.generated_tokens == 18


def test_a_client_is_told_the_hit_of_its_first_admission() -> None:
    """What a preempted request finds again of its own was computed for it, so it is no saving."""
    engine, reported = Engine(block_size=2, page_count=7, max_num_batched_tokens=16), {}
    for token in (1, 2, 3):
        engine.arrive([token] * 4, max_tokens=4)
    while engine.state.requests:
        engine.plan()
        for news in engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum())):
            reported.setdefault(news.id, set()).add(news.cached_tokens)
    assert engine.state.counters.preempted and engine.state.counters.prefix_hit_tokens
    assert reported == {0: {0}, 1: {0}, 2: {0}}
