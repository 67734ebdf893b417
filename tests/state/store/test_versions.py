"""Versions: mappings and arrays that are equal to plain copies, in every version and every order of reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.state.store.versions import VersionedArray, VersionedMap

KEYS = st.one_of(st.integers(0, 40))
CHANGES = st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=6), st.integers()), max_size=20)


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_every_version_is_its_dict(changes: list[tuple[bool, list[int], int]]) -> None:
    versions: list[tuple[VersionedMap, dict]] = [(VersionedMap(), {})]
    for adds, keys, value in changes:
        version, plain = versions[-1]
        if adds:
            versions.append((version.with_items((key, value) for key in keys), {**plain, **dict.fromkeys(keys, value)}))
        else:
            gone = {key for key in keys if key in plain}
            versions.append((version.without(sorted(gone)), {k: v for k, v in plain.items() if k not in gone}))
    for version, plain in versions:
        assert dict(version.items()) == plain and len(version) == len(plain)
        assert all(key in version and version[key] == value and version.get(key) == value for key, value in plain.items())


def test_what_is_missing_is_missing() -> None:
    version = VersionedMap().with_items([(b"\x07key", 1)])
    assert b"\x07other" not in version and version.get(b"\x08") is None
    with pytest.raises(KeyError):
        version[b"\x07other"]
    with pytest.raises(KeyError):
        version.without([b"\x07other"])


def test_a_version_does_not_hold_the_dict_it_was_given() -> None:
    older = VersionedMap().with_items([(1, "a")])
    given = {2: "b"}
    newer = older.with_items(given)
    given[3] = "c"
    assert older.items() == [(1, "a")] and newer.items() == [(1, "a"), (2, "b")]


def test_unchanged_means_the_same_object() -> None:
    version = VersionedMap().with_items([(1, "a")])
    assert version.with_items([]) is version and version.without([]) is version


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sets(st.integers(0, 7), max_size=4), st.integers()), max_size=25))
def test_every_version_of_an_array_is_its_copy(changes: list[tuple[int, set[int], int]]) -> None:
    """Changes may start from any version made so far: futures branch, and reading goes back and forth."""
    versions = [(VersionedArray(np.arange(8)), np.arange(8))]
    for choice, places, seed in changes:
        version, plain = versions[choice % len(versions)]
        where, values = np.array(sorted(places), dtype=np.int64), np.arange(len(places)) + seed % 1000
        changed = plain.copy()
        changed[where] = values
        versions.append((version.set(where, values), changed))
        assert np.array_equal(version.values(), plain)
    for version, plain in versions + versions[::-1]:
        assert np.array_equal(version.values(), plain) and np.array_equal(version.at(np.array([1, 5])), plain[[1, 5]])


def test_a_long_chain_of_versions_is_read_and_dropped_without_recursion() -> None:
    first = newest = VersionedArray(np.zeros(4, dtype=np.int64))
    for number in range(200_000):
        newest = newest.set(np.array([number % 4]), np.array([number]))
    assert first.values().tolist() == [0, 0, 0, 0] and newest.values().max() == 199_999
    del first, newest


def test_values_are_not_to_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        VersionedArray(np.zeros(4)).values()[0] = 1


def test_items_are_those_of_the_moment_they_were_asked_for() -> None:
    version = VersionedMap().with_items([(1, "a"), (2, "b")])
    found, newer = version.items(), version.without([1]).with_items([(3, "c")])
    assert sorted(newer.items()) == [(2, "b"), (3, "c")] and sorted(found) == [(1, "a"), (2, "b")]
