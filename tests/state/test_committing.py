"""Commits: who takes which token, who ends and why, and what happens to the results of those that have gone."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.state.outputs import Output
from vnext.state.state import Status, status_of


def finishes(news: list[Output]) -> list[str]:
    return [item.finish for item in news]


def test_a_token_becomes_part_of_the_history() -> None:
    engine = Engine()
    id_ = engine.arrive([1, 2, 3])
    engine.plan()
    assert engine.commit(7) == [Output(id_, "r0", 7, 0, "", -1, 0)]
    assert engine.tokens(id_) == [1, 2, 3, 7]
    assert (engine.field(id_, "known"), engine.field(id_, "computed"), engine.field(id_, "placeholders")) == (4, 3, 0)


def test_the_model_s_end_token_stops() -> None:
    engine = Engine()
    id_ = engine.arrive([1])
    engine.plan()
    assert engine.commit(0) == [Output(id_, "r0", 0, 0, "stop", 0, 0)]
    assert not engine.state.requests and engine.free == 16 and engine.state.counters.finished == 1


def test_the_model_s_end_token_may_be_ignored() -> None:
    engine = Engine()
    engine.arrive([1], max_tokens=3, ignore_eos=True)
    found = []
    for _ in range(3):
        engine.plan()
        found += finishes(engine.commit(0))
    assert found == ["", "", "length"]


def test_own_stop_tokens_stop_even_when_the_end_token_is_ignored() -> None:
    engine = Engine()
    engine.arrive([1], stop_token_ids=(5, 6), ignore_eos=True)
    engine.plan()
    assert finishes(engine.commit(0)) == [""]
    engine.plan()
    assert engine.commit(6)[0].stop_token == 6


def test_stop_tokens_belong_to_their_request() -> None:
    engine = Engine()
    engine.arrive([1], stop_token_ids=(5,))
    engine.arrive([2], stop_token_ids=(6,))
    engine.arrive([3])
    engine.plan()
    assert finishes(engine.commit(5, 5, 5)) == ["stop", "", ""]
    engine.plan()
    assert finishes(engine.commit(6, 6)) == ["stop", ""]


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (3, 4)])
def test_a_stop_token_counts_behind_min_tokens(min_tokens: int, expected: int) -> None:
    engine = Engine()
    engine.arrive([1, 1], max_tokens=9, min_tokens=min_tokens)
    reported = 0
    while engine.state.requests:
        engine.plan()
        reported += len(engine.commit(0))
    assert reported == expected


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_max_tokens_is_exact(max_tokens: int, depth: int) -> None:
    engine = Engine(pipeline_depth=depth)
    engine.arrive([1, 1, 1], max_tokens=max_tokens)
    reasons, computed = [], 0
    while engine.state.requests:
        while planned := engine.plan():
            computed += sum(planned.values())
        reasons += finishes(engine.commit(9))
    assert reasons == [""] * (max_tokens - 1) + ["length"]
    assert computed == 3 + max_tokens - 1, "the last token is never computed, and nothing is computed twice"


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    engine = Engine()
    engine.arrive([1], max_tokens=1)
    engine.plan()
    assert finishes(engine.commit(0)) == ["stop"]


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    engine = Engine(max_num_batched_tokens=4)
    id_ = engine.arrive([1] * 10)
    assert engine.plan() == {id_: 4}
    assert engine.commit() == []
    assert engine.plan() == {id_: 4}
    assert engine.commit() == []
    assert engine.plan() == {id_: 2}
    assert [news.token for news in engine.commit(7)] == [7]


def test_samples_come_in_schedule_order_and_say_their_place() -> None:
    engine = Engine(max_num_batched_tokens=6, long_prefill_token_threshold=3)
    engine.arrive([1])
    engine.arrive([1] * 9)
    engine.arrive([1, 2])
    assert engine.plan() == {0: 1, 1: 3, 2: 2}
    assert [(news.id, news.token, news.sample) for news in engine.commit(7, 8)] == [(0, 7, 0), (2, 8, 1)]


def test_results_of_an_aborted_request_are_dropped_and_others_keep_theirs() -> None:
    engine = Engine(pipeline_depth=2)
    for _ in range(3):
        engine.arrive([1])
    engine.plan()
    engine.plan()
    assert finishes(engine.abort(1)) == ["abort"]
    assert [(news.id, news.token, news.sample) for news in engine.commit(7, 8, 9)] == [(0, 7, 0), (2, 9, 2)]
    assert [(news.id, news.token) for news in engine.commit(5, 6, 4)] == [(0, 5), (2, 4)]


def test_a_finished_request_s_later_samples_are_dropped() -> None:
    engine = Engine(pipeline_depth=3)
    engine.arrive([1], max_tokens=9)
    for _ in range(3):
        assert engine.plan() == {0: 1}
    assert finishes(engine.commit(0)) == ["stop"]
    assert engine.free == 16 and engine.plan() == {}
    assert engine.commit(5) == [] and engine.commit(6) == []
    assert engine.state.counters.generated_tokens == 1 and not engine.state.in_flight


def test_a_preempted_request_s_samples_are_dropped_by_epoch() -> None:
    """The steps before and after the preemption are in flight when the old result comes."""
    engine = Engine(pipeline_depth=4, page_count=4, block_size=2, max_num_batched_tokens=8, prefix_caching=False)
    engine.arrive([1, 1], max_tokens=6)
    engine.arrive([2, 2], max_tokens=6)
    assert engine.plan() == {0: 2, 1: 2}
    assert engine.plan() == {0: 1, 1: 1}  # 4 blocks are held
    assert engine.plan() == {0: 1, 1: 1}
    assert engine.plan() == {0: 1}  # a third block for 0: 1 gives way
    assert engine.waiting == [1] and engine.state.waiting[0].preemption_count == 1 and engine.state.waiting[0].known == 2
    assert [(news.id, news.token) for news in engine.commit(5, 6)] == [(0, 5)]
    assert engine.plan() == {0: 1, 1: 2}  # 1 is back in the block that is left
    assert [(news.id, news.token) for news in engine.commit(5, 6)] == [(0, 5)]
    assert [(news.id, news.token) for news in engine.commit(5, 6)] == [(0, 5)]
    assert [(news.id, news.token) for news in engine.commit(5)] == [(0, 5)]
    assert engine.tokens(1) == [2, 2] and engine.field(1, "placeholders") == 1 and engine.field(1, "preemption_count") == 1
    assert [(news.id, news.token) for news in engine.commit(5, 7)] == [(0, 5), (1, 7)]
    engine.run_out(token=0)
    assert engine.free == 4


PHASES = ["waiting", "prefilling", "first sample in flight", "decoding", "decoding in flight", "preempted", "finished"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_frees_everything_at_once_in_any_phase(phase: str) -> None:
    engine = Engine(pipeline_depth=2, max_num_batched_tokens=4, page_count=4, block_size=2)
    keeper = engine.arrive([3], max_tokens=6) if phase == "preempted" else None
    id_ = engine.arrive([1] * (2 if phase == "preempted" else 6), max_tokens=2 if phase != "preempted" else 5)
    drive = {
        "waiting": lambda: None,
        "prefilling": lambda: engine.plan(),
        "first sample in flight": lambda: (engine.plan(), engine.plan()),
        "decoding": lambda: (engine.plan(), engine.plan(), engine.commit(), engine.commit(9)),
        "decoding in flight": lambda: (engine.plan(), engine.plan(), engine.commit(), engine.plan()),
        "preempted": lambda: until_preempted(engine, id_),
        "finished": lambda: engine.run_out(),
    }
    drive[phase]()
    expected = [] if phase == "finished" else [Output(id_, f"r{id_}", -1, -1, "abort", -1, 0)]
    assert engine.abort(id_) == expected
    assert id_ not in engine.running and id_ not in engine.waiting and id_ not in engine.state.requests
    if keeper is None:
        assert engine.free == 4
    engine.run_out()
    assert engine.free == 4 and not engine.state.in_flight


def until_preempted(engine: Engine, id_: int) -> None:
    for _ in range(20):
        engine.step()
        if engine.waiting == [id_] and engine.state.counters.preempted:
            return
    raise AssertionError("nobody was preempted")


def test_long_answers_outgrow_their_first_extent() -> None:
    """A history's extent doubles; older states keep reading theirs."""
    engine = Engine(page_count=400, block_size=4, max_model_len=1200, max_num_batched_tokens=1200)
    engine.arrive([1] * 5, max_tokens=1000)
    engine.arrive([2] * 7, max_tokens=900)
    before, arenas = None, []
    for turn in range(600):
        engine.step(token=1 + turn % 50)
        arenas += [] if engine.state.tokens.arena in arenas else [engine.state.tokens.arena]
        if turn == 200:
            before, tokens = engine.state, engine.tokens(0)
    assert engine.tokens(0) == [1] * 5 + [1 + turn % 50 for turn in range(600)]
    assert engine.tokens(1) == [2] * 7 + [1 + turn % 50 for turn in range(600)]
    assert len(arenas) <= 2, "a history that moves takes a place of the same arena; the rest is not copied"
    engine.state = before
    assert engine.tokens(0) == tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_token_that_ends_a_request_is_never_offered(depth: int) -> None:
    """At depth 2 a step in flight computes the last token and fills a block with it; at depth 1 none does."""
    engine = Engine(pipeline_depth=depth)
    engine.arrive([1] * 6, max_tokens=9)
    for token in (5, 0):
        while engine.plan():
            pass
        engine.commit(token)
    assert not engine.state.requests
    assert len(engine.state.pool.prefix_index) == 1
    engine.arrive([1] * 6 + [5, 0, 2], max_tokens=1)
    assert engine.plan() == {1: 5}


def test_a_request_walks_through_every_status() -> None:
    engine = Engine()
    assert status_of(engine.state, 0) is Status.UNKNOWN
    id_ = engine.arrive([1, 2, 3], max_tokens=2)
    assert status_of(engine.state, id_) is Status.WAITING
    engine.plan()
    assert status_of(engine.state, id_) is Status.RUNNING
    engine.commit(7)
    assert status_of(engine.state, id_) is Status.RUNNING
    engine.step(8)
    assert status_of(engine.state, id_) is Status.FINISHED
    assert status_of(engine.state, -1) is Status.UNKNOWN
