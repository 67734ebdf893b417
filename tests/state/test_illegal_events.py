"""Every illegal event raises IllegalEvent and leaves the state as it was."""

from __future__ import annotations

from typing import get_args

import pytest
from core_drive import Engine, arrival_of, config_of, resumed_of, started_with
from msgspec.structs import replace

from vnext.state.digest import parts
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.facilities.table import FACILITIES, FOLDS
from vnext.state.reduce import reduce, start


def busy(**changes: object) -> Engine:
    """Depth 2: requests 0 and 1 run, request 2 waits, step 0 is in flight and samples twice; 3 blocks are free."""
    engine = Engine(**(dict(pipeline_depth=2, max_num_seqs=2, page_count=8, max_num_batched_tokens=12) | changes))
    engine.arrive([1, 2, 3], 9)
    engine.arrive([4, 5, 6, 7, 8], 9)
    engine.arrive([9], 9)
    assert engine.plan() == {0: 3, 1: 5}
    return engine


def commit(step: int, *tokens: int) -> StepCommitted:
    return StepCommitted(step=step, tokens=pack_tokens(tokens))


CASES: dict[str, tuple[AnyEvent, str]] = {
    "second start": (started_with(config_of()), "starts once"),
    "id from the future": (arrival_of(5, [1]), "request 5 arrived where 3 is due"),
    "id from the past": (arrival_of(1, [1]), "request 1 arrived where 3 is due"),
    "empty prompt": (arrival_of(3, []), "should have been refused"),
    "prompt of broken bytes": (replace(arrival_of(3, [1]), prompt=b"\x01\x00\x00\x00\x02"), "should have been refused"),
    "no token wanted": (arrival_of(3, [1], max_tokens=0), "max_tokens is 0"),
    "longer than the model": (arrival_of(3, [1] * 60, max_tokens=5), "more than the model's 64"),
    "larger than the cache": (arrival_of(3, [1] * 30, max_tokens=4), "more than the cache's 32"),
    "abort of nobody": (RequestAborted(ids=(3,), reason="client"), "unknown cannot be aborted"),
    "abort of somebody and nobody": (RequestAborted(ids=(0, 2, 77), reason="stop"), "unknown cannot be aborted"),
    "abort of a negative id": (RequestAborted(ids=(-1,), reason="error"), "unknown cannot be aborted"),
    "plan out of order": (StepPlanned(step=2), "step 2 planned where step 1 is due"),
    "plan twice": (StepPlanned(step=0), "step 0 planned where step 1 is due"),
    "plan that preempts and admits": (StepPlanned(step=1, preempted=(1,), admitted=((0, 1),)), "may not admit"),
    "plan that preempts twice": (StepPlanned(step=1, preempted=(1, 1)), "preempted twice"),
    "plan that preempts no row": (StepPlanned(step=1, preempted=(2,)), "no such rows"),
    "plan that preempts a negative row": (StepPlanned(step=1, preempted=(-1,)), "no such rows"),
    "plan that preempts everybody": (StepPlanned(step=1, preempted=(1, 0)), "a step of 0 tokens"),
    "plan for no row": (StepPlanned(step=1, changed=((2, 1),)), "no such row: 2"),
    "plan for a negative row": (StepPlanned(step=1, changed=((-1, 1),)), "no such row: -1"),
    "plan of more than is wanted": (StepPlanned(step=1, changed=((0, 2),)), "wants 1"),
    "plan of less than nothing": (StepPlanned(step=1, changed=((0, -1),)), "cannot take -1 tokens"),
    "plan of nothing": (StepPlanned(step=1, changed=((0, 0), (1, 0))), "a step of 0 tokens"),
    "plan that admits over the batch": (StepPlanned(step=1, admitted=((0, 1),)), "room for 0"),
    "plan that admits nobody": (StepPlanned(step=1, admitted=((1, 1),)), "no such places"),
    "plan that admits from the end": (StepPlanned(step=1, admitted=((-1, 1),)), "no such places"),
    "plan that admits twice": (StepPlanned(step=1, admitted=((0, 1), (0, 1))), "admitted twice"),
    "commit out of order": (commit(1, 5, 5), "step 1 committed where step 0 is due"),
    "commit of too few": (commit(0, 5), "sampled 1 tokens where 2 were asked for"),
    "commit of too many": (commit(0, 5, 5, 5), "sampled 3 tokens where 2 were asked for"),
    "commit of a negative token": (commit(0, 5, -1), "negative token"),
    "resumption with all tokens": (resumed_of(3, [1], [5, 5, 5, 5]), "has 4 tokens already and max_tokens is 4"),
    "resumption with more": (resumed_of(3, [1], [5] * 9), "has 9 tokens already"),
    "resumption of broken bytes": (replace(resumed_of(3, [1], [5]), generated=b"\x01\x00\x00"), "has 0 tokens already"),
    "resumption behind an end token": (resumed_of(3, [1], [5, 0]), "has ended with token 0"),
    "resumption behind its own end token": (resumed_of(3, [1], [5], stop_token_ids=(5,)), "has ended with token 5"),
    "resumption from the future": (resumed_of(4, [1], [5]), "request 4 arrived where 3 is due"),
    "recovery behind a log later on": (EngineRecovered(cause="", log="before"), "in its second event"),
    "recovery behind a negative frame": (EngineRecovered(cause="", frames=-1), "less than none"),
    "recovery cautious below nobody": (EngineRecovered(cause="", cautious=-1), "less than none"),
    "commit of broken bytes": (StepCommitted(step=0, tokens=b"\x01\x00\x00"), "int32"),
}


def everything(engine: Engine) -> tuple:
    """All that a state says, by value."""
    state = engine.state
    tokens = [engine.tokens(id_) for id_ in engine.running]
    return (
        parts(state),
        tokens,
        state.waiting,
        sorted(state.pool.prefix_index.blocks().items()),
        sorted(state.requests.items()),
        state.token_digest,
    )


@pytest.mark.parametrize("name", CASES)
def test_an_illegal_event_raises_and_changes_nothing(name: str) -> None:
    event, message = CASES[name]
    engine = busy()
    state, before = engine.state, everything(engine)
    with pytest.raises(IllegalEvent, match=message):
        reduce(state, event)
    assert everything(engine) == before
    engine.commit(5, 6)  # and the engine goes on as if nothing had been said
    assert engine.tokens(0) == [1, 2, 3, 5]


def test_a_plan_beyond_the_pipeline_is_illegal() -> None:
    engine = busy()
    engine.plan()
    with pytest.raises(IllegalEvent, match="with 2 steps in flight"):
        reduce(engine.state, StepPlanned(step=2))


def test_a_commit_with_nothing_in_flight_is_illegal() -> None:
    with pytest.raises(IllegalEvent, match="no step in flight"):
        reduce(Engine().state, commit(0))


def test_an_admission_without_blocks_is_illegal() -> None:
    engine = Engine(page_count=4)
    engine.arrive([1] * 12)
    engine.arrive([2] * 8)
    assert engine.plan() == {0: 12}
    engine.commit(5)
    with pytest.raises(IllegalEvent, match="no blocks for request 1"):
        reduce(engine.state, StepPlanned(step=1, changed=((0, 0),), admitted=((0, 8),)))


def test_running_rows_without_blocks_are_illegal() -> None:
    engine = Engine(page_count=4, max_num_batched_tokens=8)
    engine.arrive([1] * 4, 8)
    engine.arrive([2] * 4, 8)
    engine.step()
    engine.step()  # both took a second block
    for _ in range(3):
        engine.step()
    assert engine.free == 0 and engine.decide().preempted == (1,)
    with pytest.raises(IllegalEvent, match="needs 2 blocks where 0 are free"):
        reduce(engine.state, StepPlanned(step=engine.state.planned))


def test_a_plan_over_the_budget_is_illegal() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.arrive([1] * 6)
    engine.arrive([2] * 6)
    with pytest.raises(IllegalEvent, match="a step of 5 tokens"):
        reduce(engine.state, StepPlanned(step=0, admitted=((0, 4), (1, 1))))


@pytest.mark.parametrize("tokens", [0, -1, 7])
def test_an_admission_takes_at_least_one_and_at_most_all_tokens(tokens: int) -> None:
    engine = Engine()
    engine.arrive([1] * 6)
    with pytest.raises(IllegalEvent, match=f"cannot start with {tokens} tokens"):
        reduce(engine.state, StepPlanned(step=0, admitted=((0, tokens),)))


def test_ended_requests_may_be_aborted_again() -> None:
    engine = Engine()
    id_ = engine.arrive([1], max_tokens=1)
    engine.step()
    assert engine.abort(id_) == []
    assert engine.state.counters.finished == 1 and engine.state.counters.aborted == 0


def test_an_end_token_that_ended_nothing_is_no_end() -> None:
    """Before `min_tokens` and where it is ignored; a request in the middle of its answer may have any number of them."""
    engine = Engine()
    engine.fold(resumed_of(0, [1], [0], min_tokens=2))
    engine.fold(resumed_of(1, [1], [0, 5, 0], ignore_eos=True))
    assert engine.waiting == [0, 1]


def test_a_result_of_ranks_that_are_gone_is_illegal() -> None:
    engine = busy()
    engine.recover()
    with pytest.raises(IllegalEvent, match="no step in flight"):
        reduce(engine.state, commit(0, 5, 6))
    assert engine.plan() == {0: 3, 1: 5}
    with pytest.raises(IllegalEvent, match="step 0 committed where step 1 is due"):
        reduce(engine.state, commit(0, 5, 6))


def test_an_id_named_twice_is_aborted_once() -> None:
    engine = busy()
    assert [news.id for news in engine.abort(0, 2, 0, 2)] == [0, 2]
    assert engine.state.counters.aborted == 2


@pytest.mark.parametrize(
    "changes",
    [
        dict(block_size=0),
        dict(page_count=0),
        dict(max_num_batched_tokens=0),
        dict(max_num_seqs=0),
        dict(max_model_len=0),
        dict(pipeline_depth=0),
        dict(microbatches=0),
        dict(microbatches=3, pipeline_depth=2),
        dict(long_prefill_token_threshold=-1),
        dict(long_prefill_token_threshold=2, chunked_prefill=False),
    ],
)
def test_a_configuration_that_cannot_work_never_starts(changes: dict) -> None:
    with pytest.raises(IllegalEvent, match=next(iter(changes))):
        start(started_with(config_of(**changes)))


def test_an_admission_behind_hits_takes_at_most_what_is_left() -> None:
    engine = Engine()
    engine.arrive([1] * 9, max_tokens=1)
    engine.run_out()
    engine.arrive([1] * 9)
    with pytest.raises(IllegalEvent, match="cannot start with 2 tokens"):
        reduce(engine.state, StepPlanned(step=1, admitted=((0, 2),)))
    assert engine.plan() == {1: 1}


def test_a_window_below_zero_is_no_window() -> None:
    with pytest.raises(IllegalEvent, match="windows is .*: each must be 0 or more"):
        start(started_with(config_of(windows=(4, -1))))


def test_what_is_no_event_is_an_error_of_the_program() -> None:
    with pytest.raises(AssertionError, match="object is no event"):
        reduce(busy().state, object())


def test_every_event_has_one_fold() -> None:
    """The facilities fold what their features have, and `fold` the others."""
    own = {EngineStarted, RequestArrived, RequestResumed, RequestAborted, StepPlanned, StepCommitted, PrefixCacheReset, EngineRecovered}
    folds = [kind for facility in FACILITIES for kind in facility.FOLDS]
    assert len(folds) == len({*folds}) and {*folds} == FOLDS.keys() and own | FOLDS.keys() == {*get_args(AnyEvent)}
    assert not own & FOLDS.keys()
