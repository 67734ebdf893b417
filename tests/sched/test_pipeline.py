"""Planning ahead: placeholders, bounds of the pipeline, and plans that cost a few bytes."""

from __future__ import annotations

import msgspec
import pytest
from core_drive import Engine

from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.reduce import reduce


def test_a_full_pipeline_waits() -> None:
    engine = Engine(pipeline_depth=2)
    engine.arrive([1], max_tokens=9)
    assert engine.plan() and engine.plan()
    assert engine.decide() is None
    engine.commit(5)
    assert engine.plan()


def test_the_next_step_is_planned_before_its_token_is_known() -> None:
    engine = Engine(pipeline_depth=3)
    id_ = engine.arrive([1, 2], max_tokens=9)
    for placeholders in (1, 2, 3):
        engine.plan()
        assert engine.field(id_, "placeholders") == placeholders and engine.field(id_, "known") == 2
        assert engine.field(id_, "computed") == 1 + placeholders
    assert engine.state.in_flight[-1].starts.tolist() == [3]
    engine.commit(5)
    assert engine.field(id_, "placeholders") == 2 and engine.tokens(id_) == [1, 2, 5]


def test_a_request_at_its_limit_is_not_planned_again() -> None:
    engine = Engine(pipeline_depth=4)
    engine.arrive([1, 2], max_tokens=2)
    assert engine.plan() == {0: 2} and engine.plan() == {0: 1}
    assert engine.plan() == {}
    engine.commit(5)
    assert engine.commit(6)[0].finish == "length"


def test_synchronous_and_pipelined_engines_compute_the_same_ranges() -> None:
    """Without stop tokens the depth changes no range, only when it is planned."""
    ranges = []
    for depth in (1, 2, 4):
        engine, seen = Engine(pipeline_depth=depth, max_num_batched_tokens=6, prefix_caching=False), []
        for length in (5, 9, 2):
            engine.arrive([1] * length, max_tokens=4)
        while engine.state.requests or engine.state.in_flight:
            while engine.plan():
                scheduled = engine.state.in_flight[-1]
                seen += zip(scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist())
            engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
        ranges.append({id_: sorted((s, c) for i, s, c in seen if i == id_) for id_ in range(3)})
    covered = [{id_: [p for s, c in r for p in range(s, s + c)] for id_, r in each.items()} for each in ranges]
    assert covered[0] == covered[1] == covered[2] == {0: list(range(8)), 1: list(range(12)), 2: list(range(5))}


def test_blocks_named_in_flight_are_hit_by_the_next_step() -> None:
    engine = Engine(pipeline_depth=2)
    engine.arrive([1] * 9)
    engine.plan()
    engine.arrive([1] * 9)
    assert engine.plan() == {0: 1, 1: 1}
    assert engine.blocks(0)[:2] == engine.blocks(1)[:2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_steady_step_over_256_rows_is_16_bytes_or_less(depth: int) -> None:
    engine = Engine(
        pipeline_depth=depth,
        max_num_seqs=256,
        block_size=16,
        page_count=600,
        max_num_batched_tokens=2048,
        prefix_caching=False,
    )
    for number in range(256):
        engine.arrive([1 + number % 7] * (1 + number % 8), max_tokens=40)
    while len(engine.running) < 256:
        engine.step()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AnyEvent)
    for _ in range(20):
        while (plan := engine.decide()) is not None:
            data = encoder.encode(plan)
            assert len(data) <= 16 and plan == StepPlanned(step=engine.state.planned)
            assert decoder.decode(data) == plan
            assert len(engine.plan()) == 256
        engine.commit(*[9] * 256)


def test_the_step_number_alone_grows_with_age() -> None:
    assert len(msgspec.msgpack.encode(StepPlanned(step=2**40))) <= 16


def test_a_plan_is_legal_in_the_state_it_was_made_in() -> None:
    """The scheduler's word is always accepted, and only in its own place."""
    engine = Engine(pipeline_depth=2, max_num_batched_tokens=5)
    for length in (4, 9, 1):
        engine.arrive([1] * length)
    plan = engine.decide()
    state = engine.state
    assert plan == engine.decide(), "the same state, the same decision"
    after = reduce(state, plan)
    assert after.planned == state.planned + 1
    assert int(after.in_flight[-1].counts.sum()) == 5
