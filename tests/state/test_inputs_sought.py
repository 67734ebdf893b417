"""Vectors of inputs in files: who is looked for waits alone, and what was found takes no unit and no room."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.log import snapshot
from vnext.sched.encoding import next_encoding, next_search
from vnext.sched.explain import explain
from vnext.sched.ranking import rows_best_first
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, InputEncoded, InputsFound, InputsSought, StepPlanned
from vnext.state.state import Sought
from vnext.state.store.inputs import input_tokens


def tile(number: int, length: int = 6) -> list[int]:
    return input_tokens(bytes([number]) * 15, length).tolist()


def streaming() -> tuple[Engine, int]:
    """An engine in which a request decodes, and its id."""
    found = Engine(page_count=128, max_model_len=128, inputs_a_step=1, input_units=512)
    id_ = found.arrive([1, 2, 3], 60)
    found.step()
    return found, id_


def test_who_is_looked_for_waits_alone_and_what_is_found_costs_nothing() -> None:
    both, stream = streaming()
    pictured = both.arrive([1, *tile(1), *tile(2), 4], 2)
    assert (event := next_search(both.state, [stream, pictured])) == InputsSought(id=pictured)
    both.fold(event)
    text = both.arrive([7, 8], 1)
    assert [(wait.id, wait.why) for wait in explain(both.state).waits] == [(pictured, "disk")]
    assert next_encoding(both.state) is None and both.step() == {stream: 1, text: 2}
    both.fold(InputsFound(id=pictured, places=(1, 7)))
    assert next_encoding(both.state) is None and both.step() == {stream: 1, pictured: 14}


def test_what_was_not_found_is_encoded_in_units() -> None:
    both, stream = streaming()
    pictured = both.arrive([1, *tile(1), *tile(2), 4], 2)
    both.fold(InputsSought(id=pictured))
    both.fold(InputsFound(id=pictured, places=(1,)))
    assert next_encoding(both.state) == InputEncoded(id=pictured, place=7, units=1)
    assert [both.step() for _ in range(3)] == [{stream: 1, pictured: 7}, {stream: 1}, {stream: 1, pictured: 7}]


def test_units_that_were_computed_before_are_forgotten() -> None:
    both, stream = streaming()
    pictured = both.arrive([*tile(1), 4], 2)
    both.step()
    assert both.state.encoding is not None and both.state.encoding.id == pictured
    both.fold(InputsSought(id=pictured))
    both.fold(InputsFound(id=pictured, places=(0,)))
    assert both.state.encoding is None and both.step() == {stream: 1, pictured: 7}


def test_one_whose_blocks_are_there_is_not_looked_for() -> None:
    alone = Engine(page_count=128, max_model_len=128, inputs_a_step=1, block_size=4)
    prompt = [1, 2, *tile(1), 3, 4, 5, 6, 7]
    alone.arrive(prompt, 1)
    alone.step()
    again = alone.arrive([*prompt, 8], 1)
    other = alone.arrive([*tile(2), 8], 1)
    assert next_search(alone.state, [again]) is None and next_search(alone.state, [again, other]) == InputsSought(id=other)


def test_who_was_overtaken_gives_way_later_than_who_overtook_it() -> None:
    both, stream = streaming()
    pictured = both.arrive([*tile(1), 4], 9)
    both.fold(InputsSought(id=pictured))
    both.arrive([5, 6], 9)
    both.step()
    both.fold(InputsFound(id=pictured, places=(0,)))
    both.step()
    assert both.state.rows.id.tolist() == [0, 2, 1] and rows_best_first(both.state) == [0, 2, 1]


def test_the_loss_of_ranks_and_the_end_of_requests_forget() -> None:
    both, _ = streaming()
    pictured, other = both.arrive([*tile(1), 4], 2), both.arrive([*tile(2), 4], 2)
    both.fold(InputsSought(id=pictured))
    both.abort(pictured)
    both.fold(InputsSought(id=other))
    assert both.state.sought == Sought((other,))
    state = both.state
    loaded = snapshot.load(snapshot.decode(snapshot.encode(snapshot.snapshot(state), 4)), state.config)
    assert loaded.sought == state.sought and digest(loaded) == digest(state)
    both.recover()
    assert both.state.sought is None and next_search(both.state, [other]) == InputsSought(id=other)


def test_what_may_not_happen() -> None:
    both, stream = streaming()
    pictured, text = both.arrive([1, *tile(1), 4], 2), both.arrive([7, 8], 1)
    wrong: list[tuple[AnyEvent, str]] = [
        (InputsSought(id=9), "does not wait"), (InputsSought(id=stream), "does not wait"), (InputsSought(id=text), "has no inputs"),
        (InputsFound(id=pictured), "nobody looks for"),
    ]  # fmt: skip
    for event, why in wrong:
        with pytest.raises(IllegalEvent, match=why):
            both.fold(event)
    both.fold(InputsSought(id=pictured))
    for places in ((0,), (2,), (1, 1), (99,), (-1,)):
        with pytest.raises(IllegalEvent, match="no inputs of request"):
            both.fold(InputsFound(id=pictured, places=places))
    with pytest.raises(IllegalEvent, match="looked for again"):
        both.fold(InputsSought(id=pictured))
    with pytest.raises(IllegalEvent, match="for which ranks still read"):
        both.fold(StepPlanned(step=both.state.planned, admitted=((0, 1),)))
    both.fold(InputsFound(id=pictured))
    with pytest.raises(IllegalEvent, match="looked for again"):
        both.fold(InputsSought(id=pictured))
