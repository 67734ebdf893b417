"""Inputs in units: one a step beside who decodes, all at once where nobody does, in order, once, and before their tokens."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.sched.encoding import next_encoding
from vnext.sched.explain import explain
from vnext.state.errors import IllegalEvent
from vnext.state.events import InputEncoded, StepPlanned
from vnext.state.state import Encoding
from vnext.state.store.inputs import input_tokens


def tile(number: int, length: int = 6) -> list[int]:
    return input_tokens(bytes([number]) * 15, length).tolist()


def engine(**changes: object) -> Engine:
    return Engine(**{"page_count": 128, "max_model_len": 128, "inputs_a_step": 1, "input_units": 512} | changes)


def streaming(**changes: object) -> tuple[Engine, int]:
    """An engine in which a request decodes, and its id."""
    found = engine(**changes)
    id_ = found.arrive([1, 2, 3], 60)
    found.step()
    return found, id_


def test_alone_an_input_is_encoded_at_once() -> None:
    alone = engine()
    alone.arrive([1, 2, *tile(1), 3, *tile(2), 4], 2)
    assert [alone.step()[0] for _ in range(3)] == [9, 7, 1] and alone.state.encoding is None
    whole = engine()
    whole.arrive([*tile(1), 3], 2)
    assert next_encoding(whole.state) == InputEncoded(id=0, place=0, units=3) and whole.step() == {0: 7}


def test_beside_a_stream_it_is_one_unit_a_step() -> None:
    both, stream = streaming()
    pictured = both.arrive([1, *tile(1), 4], 2)
    assert both.step() == {stream: 1, pictured: 1}
    seen = []
    for _ in range(2):
        seen.append((both.step(), both.state.encoding and both.state.encoding.done))
    assert seen == [({stream: 1}, 2), ({stream: 1, pictured: 7}, None)]


def test_a_waiting_request_is_encoded_before_it_joins() -> None:
    both, stream = streaming()
    pictured = both.arrive([*tile(1), 4], 2)
    assert both.step() == {stream: 1}
    assert [(wait.id, wait.why) for wait in explain(both.state).waits] == [(pictured, "inputs")]
    assert both.step() == {stream: 1} and both.step() == {stream: 1, pictured: 7}


def test_the_rest_comes_at_once_when_the_stream_has_ended() -> None:
    both, stream = streaming()
    pictured = both.arrive([*tile(1), 4], 2)
    both.step()
    both.abort(stream)
    assert next_encoding(both.state) == InputEncoded(id=pictured, place=0, units=2) and both.step() == {pictured: 7}


def test_tokens_of_inputs_have_a_bound_beside_a_stream() -> None:
    both, stream = streaming(input_units=1, input_tokens=4)
    first, second = both.arrive([*tile(1), 4], 2), both.arrive([*tile(2), 4], 2)
    assert both.step() == {stream: 1, first: 4} and both.step() == {stream: 1, first: 3, second: 2}
    assert both.step() == {stream: 1, first: 1, second: 5}
    alone = engine(input_units=1, input_tokens=4)
    alone.arrive([*tile(1), 4], 2)
    assert alone.step() == {0: 7}


def test_a_longer_input_has_more_units() -> None:
    alone = engine()
    for length in (4, 5, 6, 7, 8, 100):
        alone.arrive([*tile(length, length), 3], 1)
        assert next_encoding(alone.state).units == -(-length // 2)
        alone.step()


def test_who_leaves_gives_its_input_up() -> None:
    three, stream = streaming()
    first, second = three.arrive([*tile(1), 4], 2), three.arrive([*tile(2), 4], 2)
    three.step(), three.step()
    assert three.state.encoding == Encoding(first, 0, 2, 3, 2)
    three.abort(first)
    three.step()
    assert three.state.encoding == Encoding(second, 0, 1, 3, 3)
    assert three.step() == {stream: 1} and three.step() == {stream: 1, second: 7}


def test_ranks_that_begin_anew_have_no_units() -> None:
    both, _ = streaming()
    pictured = both.arrive([*tile(1), 4], 2)
    both.step()
    both.recover()
    assert both.state.encoding is None and next_encoding(both.state) == InputEncoded(id=pictured, place=0, units=3)


def test_what_may_not_happen() -> None:
    both, stream = streaming()
    pictured = both.arrive([1, *tile(1), 4], 2)
    for place, units, why in ((0, 1, "no input"), (1, 0, "0 units"), (1, 2, "at most 1"), (99, 1, "no input")):
        with pytest.raises(IllegalEvent, match=why):
            both.fold(InputEncoded(id=pictured, place=place, units=units))
    with pytest.raises(IllegalEvent, match="does not live"):
        both.fold(InputEncoded(id=9, place=0, units=1))
    both.fold(InputEncoded(id=pictured, place=1, units=1))
    with pytest.raises(IllegalEvent, match="at most 0"):
        both.fold(InputEncoded(id=pictured, place=1, units=1))
    with pytest.raises(IllegalEvent, match="begins the input at 1, of which units lack"):
        both.fold(StepPlanned(step=both.state.planned, admitted=((0, 8),)))
    with pytest.raises(IllegalEvent, match="encodes inputs whole"):
        whole = engine(input_units=0)
        whole.arrive([*tile(1), 4], 2)
        whole.fold(InputEncoded(id=0, place=0, units=1))


def test_bounds_need_one_input_a_step() -> None:
    for field in ("input_units", "input_tokens"):
        with pytest.raises(IllegalEvent, match=f"{field} needs inputs_a_step 1"):
            engine(**{"input_units": 0, field: 1}, inputs_a_step=2)
        with pytest.raises(IllegalEvent, match=f"{field} is -1: it must be 0 or more"):
            engine(**{field: -1})
