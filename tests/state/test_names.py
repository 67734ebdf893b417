"""Names: both sides of the prefix table in every version, and the compiled moves beside the plain ones."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.state import names, names_plain
from vnext.state.names import Names, no_names

BLOCKS = 8
FORMS = [names_plain, *([names._names] if names._names else [])]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.rpartition(".")[2])


def key_of(number: int) -> bytes:
    return bytes([number] * 16)


def sides(version: Names) -> tuple[dict[bytes, int], list[bytes | None]]:
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
    versions: list[tuple[Names, dict[bytes, int]]] = [(no_names(BLOCKS), {})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "kernels", form)
        for choice, offers, pairs in changes:
            version, plain = versions[choice % len(versions)]
            expected = dict(plain)
            if offers:
                new = [(key_of(key), block) for key, block in pairs if version.key_of(block) is None]
                for key, block in new:
                    expected.setdefault(key, block)
                versions.append((version.offered(new), expected))
            else:
                taken = [block for _, block in pairs]
                expected = {key: block for key, block in plain.items() if block not in taken}
                versions.append((version.without(blocks(*taken)), expected))
        for version, plain in versions + versions[::-1]:
            table, keys = sides(version)
            assert table == plain and len(version) == len(plain) == version.count(range(BLOCKS))
            assert keys == [next((key for key, at in plain.items() if at == block), None) for block in range(BLOCKS)]
            assert version.blocks_of(plain) == list(plain.values()) and version.block_of(key_of(99)) is None


@forms
def test_moves_say_what_they_moved(form: ModuleType) -> None:
    table, keys = {}, [None] * 4
    pairs = [(key_of(1), 2), (key_of(2), 0)]
    assert form.offer(table, keys, pairs) is pairs
    assert form.offer(table, keys, [(key_of(3), 1), (key_of(1), 3)]) == [(key_of(3), 1)]
    assert (table, keys) == ({key_of(1): 2, key_of(2): 0, key_of(3): 1}, [key_of(2), key_of(3), key_of(1), None])
    assert form.forget(table, keys, blocks(3, 2)) == [(key_of(1), 2)]
    form.change(table, keys, [(key_of(3), 1)], [(key_of(1), 3)])
    assert (table, keys) == ({key_of(2): 0, key_of(1): 3}, [key_of(2), None, None, key_of(1)])


@forms
def test_sides_that_differ_are_refused(form: ModuleType) -> None:
    with pytest.raises(KeyError):
        form.forget({}, [key_of(1)], blocks(0))
    with pytest.raises(KeyError):
        form.change({}, [None], [(key_of(1), 0)], [])
    with pytest.raises(IndexError):
        form.forget({}, [None], blocks(1))
    with pytest.raises(IndexError):
        form.offer({}, [None], [(key_of(1), 1)])


def test_unchanged_means_the_same_object() -> None:
    version = no_names(2).offered([(key_of(1), 0)])
    assert version.offered([]) is version and version.offered([(key_of(1), 1)]) is version
    assert version.without(blocks(1)) is version
