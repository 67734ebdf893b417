"""The compiled columns are the plain ones: equal on every call of seeded runs, in results and in every array they fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.state.store import columns, columns_numpy, fields
from vnext.state.store.fields import FIELD_COUNT, FIELD_NAMES

compiled = columns._columns
NAMES = (
    "expected",
    "needed",
    "advance",
    "write_tables",
    "array_hash",
    "exchange",
    "oldest",
    "released",
    "block_hashes",
    "hash_full_blocks",
    "step_entries",
    "lawful",
    "bounds",
    "match_samples",
    "take_tokens",
    "drafts",
    "match_runs",
    "settle",
)
SEEDS = range(40)
FOLLOWED_BY = {
    "expected": lambda given, _: [
        ("needed", (given[0], np.arange(given[0].shape[1]) % 5, np.empty(given[0].shape[1], dtype=np.int64), given[4])),
        ("lawful", (given[0], given[4], 8)),
        ("lawful", (given[0] + 1, given[4], 0)),
        *(("expected", (given[0], np.empty_like(given[1]), *given[2:5], count, given[6])) for count in (2, 3, 5) if given[5] == 1),
    ],
    "step_entries": lambda given, count: [("bounds", (given[3][:, :count].copy(), given[4][:count].copy()))],
}
"""Functions that a run asks rarely or never are asked beside one that it asks always: name, arguments."""

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled columns are not built here: no C compiler was found")


def both(name: str, calls: Counter[str]) -> Callable[..., object]:
    """A function that calls the two forms on copies of its arguments, compares all they did, and does it for real."""

    def call(*given: object) -> object:
        calls[name] += 1
        copies = [[one.copy() if isinstance(one, np.ndarray) else one for one in given] for _ in range(2)]
        plain, fast = getattr(columns_numpy, name)(*copies[0]), getattr(compiled, name)(*copies[1])
        assert plain == fast, name
        for other, arguments in FOLLOWED_BY.get(name, lambda *_: [])(given, plain):
            both(other, calls)(*arguments)
        count = filled(name, given, plain)
        for one, other in zip(*copies):
            if isinstance(one, np.ndarray):
                assert np.array_equal(one[..., :count], other[..., :count]), name
        return getattr(compiled, name)(*given)

    return call


def filled(name: str, given: tuple, result: object) -> int | None:
    """How far each line of the arrays has to be filled; the rest is left as it came. None: all of it."""
    if name == "match_runs":
        return result[0] if result else 0
    if (name == "match_samples" and result is None) or (name == "take_tokens" and result is False):
        return 0
    return result if name == "step_entries" else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    forms = {name: both(name, counted) for name in NAMES}
    monkeypatch.setattr(
        columns, "impl", SimpleNamespace(**forms, turn=compiled.turn)
    )  # tests/sched/test_turn.py compares it
    yield counted


def test_the_two_forms_agree_on_every_call(calls: Counter[str]) -> None:
    for seed in SEEDS:
        simulate(scenario(seed, client_count=12))
    assert set(calls) == set(NAMES) and min(calls.values()) > 50


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
def test_either_form_serves_alone(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "impl", form)
    assert len(simulate(scenario(3, client_count=12)).events) > 50


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize(("computed", "is_lawful"), [(4, True), (5, True), (6, False)])
def test_a_row_is_lawful_up_to_the_placeholder_it_owes(form: object, computed: int, is_lawful: bool) -> None:
    cells = np.zeros((FIELD_COUNT, 1), dtype=np.int64)
    cells[fields.KNOWN], cells[fields.PLACEHOLDERS], cells[fields.LIMIT] = 4, 1, 9
    cells[fields.COMPUTED], cells[fields.BLOCKS] = computed, -(-computed // 4)
    assert form.lawful(cells, 4, 0) == is_lawful


def test_the_layouts_are_one() -> None:
    assert FIELD_NAMES == [name.lower() for name in list(compiled.CONSTANTS)[:FIELD_COUNT]]


def test_the_installed_form_is_the_compiled_one() -> None:
    assert columns.implementation() == "compiled" and columns.impl is compiled


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cells, short: compiled.expected(cells, short, 9, 0, 4, 1, 0),
        lambda cells, short: compiled.needed(cells, short, short, 4),
        lambda cells, short: compiled.advance(cells, short, short, short),
        lambda cells, short: compiled.step_entries(cells, short, short, short, short),
        lambda cells, short: compiled.bounds(np.ones((4, 99), dtype=np.int64), short),
        lambda cells, short: compiled.exchange(short, np.array([0, 2], dtype=np.int32), np.ones(2, dtype=np.int64)),
        lambda cells, short: compiled.exchange(short, np.array([-1], dtype=np.int32), np.ones(1, dtype=np.int64)),
        lambda cells, short: compiled.exchange(short, np.array([0, 1], dtype=np.int32), np.ones(1, dtype=np.int64)),
        lambda cells, short: compiled.released(
            short, np.array([0, 2], dtype=np.int32), 0, short, np.zeros(2, dtype=np.int32)
        ),
        lambda cells, short: compiled.released(
            short, np.zeros(3, dtype=np.int32), 0, short, np.zeros(3, dtype=np.int32)
        ),
        lambda cells, short: compiled.block_hashes(b"a short key", bytes(64), 4),
        lambda cells, short: compiled.block_hashes(bytes(16), bytes(64), 0),
        lambda cells, short: compiled.goes_on_alike(bytes(64), bytes(64), -1),
        lambda cells, short: compiled.oldest(np.zeros(2, dtype=np.int32), short, 0, 2, np.zeros(9, dtype=np.int32)),
        lambda cells, short: compiled.write_tables(
            cells, np.full(6, 5), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32), 1
        ),
        lambda cells, short: compiled.hash_full_blocks(
            cells * np.arange(FIELD_COUNT)[::-1, None],
            short[:0],
            short.astype(np.int32),
            short.astype(np.int32),
            1,
            bytes(8),
        ),
        lambda cells, short: compiled.take_tokens(
            cells, cells.copy(), np.array([99]), np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
        ),
    ],
)
def test_arrays_that_are_too_short_are_refused(wrong: Callable) -> None:
    """Memory outside an array is never touched, whatever a caller hands in."""
    with pytest.raises(ValueError):
        wrong(np.ones((FIELD_COUNT, 6), dtype=np.int64), np.zeros(2, dtype=np.int64))


def test_the_compiled_digest_is_blake2b() -> None:
    """Blocks of one to a hundred tokens: messages below, at and above the 128 bytes that BLAKE2b takes at a time."""
    words = np.arange(3000, dtype=np.int32).tobytes()
    for size in (1, 2, 15, 16, 27, 28, 29, 31, 32, 59, 60, 61, 100):
        assert compiled.block_hashes(bytes(range(16)), words, size) == columns_numpy.block_hashes(
            bytes(range(16)), words, size
        )


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize(
    "known, ends, hashed_blocks", [(4, False, 1), (4, True, 0), (5, True, 1), (8, True, 1), (9, True, 2)]
)
def test_the_last_token_of_a_request_that_ends_is_in_no_block(
    form: object, known: int, ends: bool, hashed_blocks: int
) -> None:
    cells = np.zeros((FIELD_COUNT, 1), dtype=np.int64)
    cells[[FIELD_NAMES.index("known"), FIELD_NAMES.index("computed")]] = known
    ended, tokens = np.arange(int(ends)), np.arange(12, dtype=np.int32)
    pairs = form.hash_full_blocks(cells, ended, tokens, tokens, 4, bytes(8))
    assert [page for _, page in pairs] == list(range(hashed_blocks)) and cells[
        FIELD_NAMES.index("hashed_blocks"), 0
    ] == hashed_blocks


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize("length", [0, 1, 7, 255, 256, 257, 1023, 1024, 1025, 3000])
def test_common_beginnings_are_found_wherever_they_end(form: Any, length: int) -> None:
    one, others, common = np.arange(length, dtype=np.int32), list[bytes](), list[int]()
    for place in {0, 1, 2, 15, 16, 17, 255, 256, 272, 1023, 1025, 2999} & {*range(length)}:
        other = one.copy()
        other[place] ^= 1 << 8 * (place % 4)
        for each in (other, one[:place], [*other[: place + 1], *one[:5]]):
            others.append(np.array(each, np.int32).tobytes())
            common.append(place)
    others += [one.tobytes(), b"", np.append(one, 7).astype(np.int32).tobytes()]
    found = form.most_alike(one.tobytes(), others)
    assert found == sorted(zip([*common, length, 0, length], range(len(others))), key=lambda each: (-each[0], each[1]))


@pytest.mark.parametrize("form", [columns_numpy, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize("length", [0, 1, 2, 9, 256, 300, 1000])
def test_half_of_the_rest_makes_texts_go_on_alike(form: Any, length: int) -> None:
    """To the token, wherever the others stand."""
    rng, one = np.random.default_rng(length), np.arange(length + 5, dtype=np.int32)
    for at in {0, 1, length // 3, length}:
        for changed in {0, (length - at) // 2, (length - at) // 2 + 1, length - at} & {*range(length - at + 1)}:
            other = one[:length].copy()
            other[at + rng.permutation(length - at)[:changed]] += 1 << 20
            other[:at] = -1  # what stands before does not count
            assert form.goes_on_alike(one.tobytes(), other.tobytes(), at) == (2 * changed <= length - at), (at, changed)
