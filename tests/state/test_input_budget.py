"""How many inputs the prompts of a step begin: one after the other, behind nobody's tokens, and with a reason for who waits."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.sched.explain import explain
from vnext.state.errors import IllegalEvent
from vnext.state.store.inputs import input_tokens


def tile(number: int, length: int = 6) -> list[int]:
    return input_tokens(bytes([number]) * 15, length).tolist()


def engine(**changes: object) -> Engine:
    return Engine(**{"page_count": 128, "max_model_len": 128, "inputs_a_step": 1} | changes)


def test_a_chunk_ends_where_a_second_input_begins() -> None:
    alone = engine()
    alone.arrive([1, 2, *tile(1), 3, *tile(2), *tile(3), 4], 2)
    assert [alone.step()[0] for _ in range(4)] == [9, 6, 7, 1]


def test_without_a_bound_a_prompt_is_one_chunk() -> None:
    alone = engine(inputs_a_step=0)
    alone.arrive([1, 2, *tile(1), 3, *tile(2), *tile(3), 4], 2)
    assert alone.step() == {0: 22}


def test_who_decodes_goes_on_in_each_step() -> None:
    both = engine()
    first = both.arrive([1, 2, 3], 9)
    both.step()
    many = both.arrive([*tile(1), *tile(2), *tile(3), 4], 2)
    assert [both.step() for _ in range(3)] == [{first: 1, many: 6}, {first: 1, many: 6}, {first: 1, many: 7}]


def test_rows_before_admitted_ones_and_each_knows_why_it_waits() -> None:
    three = engine()
    first, second, third = (three.arrive([*tile(number), *tile(number + 3), 4], 2) for number in (1, 2, 3))
    assert three.step() == {first: 6}
    found = {wait.id: wait.why for wait in explain(three.state).waits}
    assert found == {second: "inputs", third: "order"}
    assert three.step() == {first: 7} and three.step() == {first: 1, second: 6}


def test_text_joins_a_step_that_encodes() -> None:
    both = engine(policy="priority")
    pictured = both.arrive([*tile(1), *tile(2), 4], 2)
    text = both.arrive([1, 2, 3], 2, priority=1)
    assert both.step() == {pictured: 6, text: 3}


def test_a_row_that_waits_for_its_input_says_so() -> None:
    both = engine(long_prefill_token_threshold=3)
    first, second = (both.arrive([1, 1, number, *tile(number), 4], 2) for number in (1, 2))
    assert both.step() == {first: 3, second: 3}
    assert [(wait.id, wait.why) for wait in explain(both.state).waits] == [(second, "inputs")]
    assert both.step() == {first: 3} and both.step() == {first: 3, second: 3}


def test_a_bound_needs_prompts_in_pieces() -> None:
    with pytest.raises(IllegalEvent, match="inputs_a_step needs chunked prefill"):
        engine(chunked_prefill=False)
    with pytest.raises(IllegalEvent, match="inputs_a_step is -1: it must be 0 or more"):
        engine(inputs_a_step=-1)
