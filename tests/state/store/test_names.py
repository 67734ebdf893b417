"""Names: both sides of the prefix table in every version, and the compiled moves beside the plain ones."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.state.store import prefix_index, prefix_index_plain
from vnext.state.store.prefix_index import PrefixIndex, empty_prefix_index

BLOCKS = 8
FORMS = [prefix_index_plain, *([prefix_index._prefix_index] if prefix_index._prefix_index else [])]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])


def hash_of(number: int) -> bytes:
    return bytes([number] * 16)


def sides(version: PrefixIndex) -> tuple[dict[bytes, int], list[bytes | None]]:
    return dict(version.blocks()), version.keys()


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


Change = tuple[int, bool, list[tuple[int, int]]]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.booleans(),
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, BLOCKS - 1)), max_size=5, unique_by=lambda pair: pair[1]),
    ),
    max_size=25,
)


@forms
@settings(max_examples=100, deadline=None)
@given(CHANGES)
def test_every_version_is_its_dict(form: ModuleType, changes: list[Change]) -> None:
    """Changes may start from any version made so far: futures branch, and reading goes back and forth."""
    versions: list[tuple[PrefixIndex, dict[bytes, int]]] = [(empty_prefix_index(BLOCKS), {})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "impl", form)
        for choice, offers, pairs in changes:
            version, plain = versions[choice % len(versions)]
            expected = dict(plain)
            if offers:
                new = [(hash_of(key), block) for key, block in pairs if version.hash_of(block) is None]
                for key, block in new:
                    expected.setdefault(key, block)
                versions.append((version.insert(new), expected))
            else:
                taken = [block for _, block in pairs]
                expected = {key: block for key, block in plain.items() if block not in taken}
                versions.append((version.remove(blocks(*taken)), expected))
        for version, plain in versions + versions[::-1]:
            table, keys = sides(version)
            assert table == plain and len(version) == len(plain) == version.count(range(BLOCKS))
            assert keys == [next((key for key, at in plain.items() if at == block), None) for block in range(BLOCKS)]
            assert version.blocks_of(plain) == list(plain.values()) and version.block_of(hash_of(99)) is None


@forms
def test_moves_say_what_they_moved(form: ModuleType) -> None:
    table, keys = {}, [None] * 4
    pairs = [(hash_of(1), 2), (hash_of(2), 0)]
    assert form.insert(table, keys, pairs) is pairs
    assert form.insert(table, keys, [(hash_of(3), 1), (hash_of(1), 3)]) == [(hash_of(3), 1)]
    assert (table, keys) == ({hash_of(1): 2, hash_of(2): 0, hash_of(3): 1}, [hash_of(2), hash_of(3), hash_of(1), None])
    assert form.remove(table, keys, blocks(3, 2)) == [(hash_of(1), 2)]
    form.apply(table, keys, [(hash_of(3), 1)], [(hash_of(1), 3)])
    moves = [(hash_of(2), 1), 0, 1, (hash_of(2), 1), (hash_of(4), 2), 3]
    came, gone = [(hash_of(2), 1), (hash_of(4), 2)], [(hash_of(2), 0), (hash_of(1), 3)]
    before = table.copy(), keys.copy()
    assert form.move(table, keys, moves) == (came, gone) and table == {hash_of(2): 1, hash_of(4): 2}
    form.apply(table, keys, came, gone)
    assert (table, keys) == before
    assert (table, keys) == ({hash_of(2): 0, hash_of(1): 3}, [hash_of(2), None, None, hash_of(1)])


@forms
def test_sides_that_differ_are_refused(form: ModuleType) -> None:
    with pytest.raises(KeyError):
        form.remove({}, [hash_of(1)], blocks(0))
    with pytest.raises(KeyError):
        form.apply({}, [None], [(hash_of(1), 0)], [])
    with pytest.raises(IndexError):
        form.remove({}, [None], blocks(1))
    with pytest.raises(IndexError):
        form.insert({}, [None], [(hash_of(1), 1)])
    for far in (1, (hash_of(1), 1)):
        with pytest.raises(IndexError):
            form.move({}, [None], [far])


def test_unchanged_means_the_same_object() -> None:
    version = empty_prefix_index(2).insert([(hash_of(1), 0)])
    assert version.insert([]) is version and version.insert([(hash_of(1), 1)]) is version
    assert version.remove(blocks(1)) is version


def test_the_form_that_serves_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = prefix_index.impl is not prefix_index_plain
    assert prefix_index.implementation() == ("compiled" if compiled else "plain")
    monkeypatch.setattr(prefix_index, "impl", prefix_index_plain)
    assert prefix_index.implementation() == "plain"
