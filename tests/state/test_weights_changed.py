"""Weights that change between two steps: who goes on, and that no block of other weights is a hit."""

from __future__ import annotations

import pytest

from tests.core_drive import Engine, arrival_of
from vnext.state.errors import IllegalEvent
from vnext.state.events import EnginePaused, RequestAborted, RequestResumed, WeightsChanged, pack_tokens, unpack_tokens
from vnext.state.state import root_of

PROMPT = list(range(1, 14))


def changed(engine: Engine, version: int = 1, digest: str = "d1") -> None:
    engine.fold(WeightsChanged(version=version, digest=digest))


def pause(engine: Engine, mode: str) -> None:
    engine.fold(EnginePaused(mode=mode))


def test_no_block_of_old_weights_is_a_hit_also_where_they_return():
    engine = Engine()
    engine.arrive(PROMPT, max_tokens=1)
    engine.step()
    engine.arrive(PROMPT, max_tokens=1)
    assert engine.plan() == {1: 1}, "the same weights: all but the last token is cached"
    engine.commit(33)
    for version, digest in ((1, "d1"), (2, "d2"), (3, "d1")):
        pause(engine, "wait")
        changed(engine, version, digest)
        pause(engine, "")
        id_ = engine.arrive(PROMPT, max_tokens=1)
        assert engine.plan() == {id_: 13}
        engine.commit(33)
        id_ = engine.arrive(PROMPT, max_tokens=1)
        assert engine.plan() == {id_: 1}
        engine.commit(33)


def test_a_request_that_lives_on_computes_its_tokens_again():
    engine = Engine()
    id_ = engine.arrive(PROMPT, max_tokens=5)
    engine.step(token=33)
    pause(engine, "keep")
    assert engine.plan() == {}
    changed(engine)
    assert [entry.id for entry in engine.state.waiting] == [id_]
    assert unpack_tokens(engine.state.waiting[0].tokens).tolist() == [*PROMPT, 33]
    pause(engine, "")
    assert engine.plan() == {id_: 14}
    assert engine.state.rows.block_hash(0) != root_of(engine.state, engine.state.requests[id_])


def test_waiting_for_the_end_admits_no_request_that_has_not_begun():
    engine = Engine(max_num_seqs=2)
    first = engine.arrive(PROMPT, max_tokens=2)
    engine.step(token=33)
    second = engine.arrive(PROMPT, max_tokens=2)
    pause(engine, "wait")
    with pytest.raises(IllegalEvent, match="with the old ones"):
        changed(engine)
    assert engine.plan() == {first: 1}
    engine.commit(33)
    assert engine.plan() == {} and engine.running == []
    changed(engine)
    pause(engine, "")
    assert engine.plan() == {second: 13}


def test_a_preempted_request_belongs_to_those_that_finish_first():
    engine = Engine(max_num_seqs=2, page_count=8)
    engine.arrive(PROMPT, max_tokens=12), engine.arrive([7] * 13, max_tokens=12)
    while not engine.state.counters.preempted:
        engine.step(token=33)
    pause(engine, "wait")
    assert engine.state.waiting
    while engine.plan():
        engine.commit(33)
    assert not engine.state.requests
    changed(engine)


def test_a_request_from_another_engine_has_begun():
    engine = Engine()
    pause(engine, "wait")
    arrival = arrival_of(0, PROMPT, max_tokens=2)
    fields = {name: getattr(arrival, name) for name in arrival.__struct_fields__}
    engine.fold(RequestResumed(**fields | {"generated": pack_tokens([33])}))
    with pytest.raises(IllegalEvent, match="old ones"):
        changed(engine)
    engine.step()
    changed(engine)


@pytest.mark.parametrize("mode", ["keep", "abort", "sleep"])
def test_a_paused_engine_plans_nothing(mode):
    engine = Engine()
    engine.arrive(PROMPT)
    plan = engine.plan
    if mode == "abort":
        with pytest.raises(IllegalEvent, match="ends them first"):
            pause(engine, mode)
        engine.fold(RequestAborted(ids=(0,), reason="client"))
    pause(engine, mode)
    engine.arrive(PROMPT)
    assert plan() == {}
    pause(engine, "")
    assert plan()


def test_weights_change_only_at_rest_and_forward():
    engine = Engine(pipeline_depth=2)
    engine.arrive(PROMPT)
    with pytest.raises(IllegalEvent, match="old ones"):
        changed(engine)
    engine.plan()
    pause(engine, "keep")
    with pytest.raises(IllegalEvent, match="old ones"):
        changed(engine)
    with pytest.raises(IllegalEvent, match="no step in flight"):
        pause(engine, "sleep")
    engine.commit(33)
    changed(engine, version=4)
    for version, digest in ((4, "d"), (3, "d"), (5, "")):
        with pytest.raises(IllegalEvent):
            changed(engine, version, digest)
    assert engine.state.weights.version == 4


def test_asleep_nothing_is_kept():
    engine = Engine()
    id_ = engine.arrive(PROMPT, max_tokens=3)
    engine.step(token=33)
    pause(engine, "keep"), pause(engine, "sleep")
    assert engine.state.pool.free == engine.state.pool.page_count and engine.state.pool.kept == 0
    pause(engine, "")
    assert engine.plan() == {id_: 14}
