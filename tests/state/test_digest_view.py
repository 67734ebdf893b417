"""What a digest covers and what it leaves out, and a state as plain values."""

from __future__ import annotations

import json

import numpy as np
import pytest
from core_drive import Engine
from msgspec.structs import replace

from vnext.replay.reading.show import view
from vnext.state.digest import digest, hexadecimal, histories, parts, requests_otherwise
from vnext.state.state import State
from vnext.state.store import extents
from vnext.state.store.fields import FIELD_NAMES, TABLE_HASH
from vnext.state.store.rows import Rows
from vnext.state.store.versions import VersionedArray
from vnext.state.waiting_queue import dequeue, enqueue


def busy(token: int = 1, answer: int = 9, salt: str = "", name: str = "a") -> Engine:
    """Two rows, one waiting request, one step in flight; the texts are the caller's."""
    engine = Engine(pipeline_depth=2, max_num_seqs=2)
    for length in (9, 5, 3):
        engine.arrive([token] * length, name=name, cache_salt=salt)
    engine.step(answer)
    engine.plan()
    return engine


def with_cell(state: State, field: int, row: int, value: int) -> State:
    cells = state.rows.cells.copy()
    cells[field, row] = value
    return replace(state, rows=Rows(cells))


def test_a_digest_is_64_bits_and_repeats() -> None:
    assert digest(busy().state) == digest(busy().state)
    assert 0 <= digest(busy().state) < 2**64


def test_texts_names_and_salts_do_not_reach_it() -> None:
    assert digest(busy(1, 9).state) == digest(busy(2, 8, "salt", "other").state)
    assert busy(1, 9).state.token_digest != busy(1, 8).state.token_digest


@pytest.mark.parametrize("field", ["tokens_at", "tokens_size", "table_at", "table_size", "block_hash_0", "block_hash_1"])
def test_places_and_content_names_are_no_structure(field: str) -> None:
    state = busy().state
    cells = state.rows.cells.copy()
    cells[FIELD_NAMES.index(field)] += 1
    assert rows_part(replace(state, rows=Rows(cells))) == rows_part(state)


def test_a_moved_table_has_the_same_digest() -> None:
    state = busy().state
    rows, cells = state.rows, state.rows.cells.copy()
    sizes = cells[FIELD_NAMES.index("table_size")] + 3
    tables, cells[FIELD_NAMES.index("table_at")] = extents.compact(state.tables, rows.table_at, rows.blocks, sizes, 5)
    assert digest(replace(state, tables=tables, rows=Rows(cells))) == digest(state)


def rows_part(state) -> bytes:
    return dict(parts(state))["rows"]


def test_the_sequence_counts_events() -> None:
    engine = Engine()
    assert engine.state.sequence == 1, "the start is the first"
    for count in (2, 3, 4):
        engine.arrive([1])
        assert engine.state.sequence == count
    engine.step()
    assert engine.state.sequence == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, sequence=s.sequence + 1),
        lambda s: replace(s, next_id=s.next_id + 1),
        lambda s: replace(s, committed=s.committed + 1),
        lambda s: dequeue(s, {0}),
        lambda s: enqueue(dequeue(s, {0}), replace(s.waiting[0], preemption_count=1)),
        lambda s: enqueue(dequeue(s, {0}), replace(s.waiting[0], cached=4)),
        lambda s: replace(s, in_flight=()),
        lambda s: replace(s, in_flight=(replace(s.in_flight[0], entries=s.in_flight[0].entries + 1),)),
        lambda s: replace(s, in_flight=(replace(s.in_flight[0], samples=~s.in_flight[0].samples),)),
        lambda s: replace(s, rows=Rows(s.rows.cells[:, ::-1].copy())),
        lambda s: replace(s, pool=replace(s.pool, status=VersionedArray(s.pool.status.values()[::-1].copy()))),
        lambda s: replace(s, pool=replace(s.pool, status=VersionedArray(s.pool.status.values() + 1))),
        lambda s: replace(s, pool=replace(s.pool, status=s.pool.status.set(np.array([1]), np.array([-7])))),
        lambda s: replace(s, counters=replace(s.counters, preempted=7)),
        lambda s: with_cell(s, TABLE_HASH, 0, 5),
    ],
)
def test_every_part_of_the_structure_reaches_it(change) -> None:
    state = busy().state
    assert digest(change(state)) != digest(state)


def test_parts_name_what_differs() -> None:
    state = busy().state
    other = dequeue(state, {0})
    differing = [name for (name, left), (_, right) in zip(parts(state), parts(other)) if left != right]
    assert differing == ["scalars", "waiting"]


def test_a_view_is_json_and_says_what_is() -> None:
    engine = busy()
    seen = view(engine.state)
    assert json.loads(json.dumps(seen)) == seen
    assert [row["id"] for row in seen["running"]] == [0, 1] and [entry["id"] for entry in seen["waiting"]] == [2]
    assert seen["running"][0]["table"] == engine.blocks(0)
    assert seen["blocks"]["free"] == engine.free and seen["blocks"]["total"] == 16
    assert seen["flights"] == [
        {"step": 1, "requests": [{"id": 0, "start": 9, "tokens": 1, "samples": True},
                                 {"id": 1, "start": 5, "tokens": 1, "samples": True}]}
    ]  # fmt: skip


def test_a_view_holds_no_token() -> None:
    assert view(busy(1, 9).state) == view(busy(2, 8).state)


def test_histories_tell_which_requests_have_other_tokens() -> None:
    """Rows and the queue alike: one word for each request, so replicas find those that differ."""
    state = busy().state
    words = histories(state)
    assert len(words) == 3 and all(isinstance(word, int) for word in words)
    assert requests_otherwise(state, words) == ()
    for place in range(3):
        assert requests_otherwise(state, [word + (at == place) for at, word in enumerate(words)]) == (place,)
    assert requests_otherwise(busy(answer=8).state, words) == (0, 1), "the one that waits has no answer yet"
    assert requests_otherwise(busy(token=2).state, words) == (0, 1, 2)


def test_a_digest_is_written_with_all_its_digits() -> None:
    assert hexadecimal(0xAB) == "00000000000000ab" and hexadecimal(2**64 - 1) == "f" * 16
