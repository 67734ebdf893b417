"""Extents: appends never reach what an older version may read, and compaction moves without losing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.state.store import extents


def values_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10**6)), min_size=1, max_size=40))
def test_any_tree_of_versions_reads_as_plain_lists(steps: list[tuple[int, int]]) -> None:
    """Each step appends to a version chosen freely, so pasts with several futures are common."""
    versions = [(extents.empty(64), [])]
    for which, value in steps:
        store, plain = versions[which % len(versions)]
        longer, at = extents.own(store, 1), store.used
        longer = extents.write(longer, slice(at, at + 1), values_of(value))
        versions.append((longer, [*plain, value]))
    for store, plain in versions:
        assert extents.read(store, 0, store.used).tolist() == plain


def test_a_newest_version_appends_in_place_and_an_old_one_copies() -> None:
    old = extents.own(extents.empty(8), 4)
    newest = extents.write(old, slice(0, 1), values_of(1))
    assert newest.arena is old.arena
    other = extents.write(old, slice(0, 1), values_of(2))
    assert other.arena is not old.arena
    assert extents.read(newest, 0, 1).tolist() == [1] and extents.read(other, 0, 1).tolist() == [2]


def test_two_futures_never_get_the_same_places() -> None:
    past = extents.empty(8)
    left, left_at = extents.own(past, 2), past.used
    right, right_at = extents.own(past, 2), past.used
    left = extents.write(left, slice(left_at, left_at + 2), values_of(1, 2))
    right = extents.write(right, slice(right_at, right_at + 2), values_of(3, 4))
    assert extents.read(left, left_at, 2).tolist() == [1, 2]
    assert extents.read(right, right_at, 2).tolist() == [3, 4]


def test_reads_are_read_only() -> None:
    assert not extents.read(extents.empty(4), 0, 2).flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), st.integers(0, 40))
def test_compaction_keeps_every_extent_and_makes_room(shapes: list[tuple[int, int]], extra: int) -> None:
    store, at, contents = extents.empty(128), [], []
    for number, (count, spare) in enumerate(shapes):
        store, place = extents.own(store, count + spare), store.used
        content = [10 * number + offset for offset in range(count)]
        store = extents.write(store, slice(place, place + count), values_of(*content))
        at.append(place)
        contents.append(content)
    counts, sizes = np.array([c for c, _ in shapes], dtype=np.int64), np.array([c + s for c, s in shapes], dtype=np.int64)
    moved, places = extents.compact(store, np.array(at, dtype=np.int64), counts, sizes, extra)
    assert [extents.read(moved, int(p), int(c)).tolist() for p, c in zip(places, counts)] == contents
    assert moved.used == int(sizes.sum()) and moved.capacity - moved.used >= extra
    ends = places + sizes
    assert all(int(ends[i]) <= int(places[i + 1]) for i in range(len(shapes) - 1)), "extents overlap"


def test_a_moved_extent_leaves_the_others_and_its_past_alone() -> None:
    past = extents.append(extents.append(extents.empty(16), values_of(1, 2)), values_of(3, 4, 5))
    moved, places = extents.move(past, np.array([2]), np.array([3]), np.array([6]))
    assert places.tolist() == [5] and moved.used == 11 and moved.arena is past.arena
    assert extents.read(moved, 5, 3).tolist() == [3, 4, 5]
    other, _ = extents.move(past, np.array([0]), np.array([2]), np.array([4]))
    assert other.arena is not moved.arena, "a second future of one state has an arena of its own"
    assert extents.read(other, 5, 2).tolist() == [1, 2] and extents.read(moved, 5, 3).tolist() == [3, 4, 5]
    assert extents.read(past, 0, 5).tolist() == [1, 2, 3, 4, 5]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=8))
def test_spans_are_the_ranges_one_after_the_other(ranges: list[tuple[int, int]]) -> None:
    at, counts = np.array([a for a, _ in ranges], dtype=np.int64), np.array([c for _, c in ranges], dtype=np.int64)
    assert extents.spans(at, counts).tolist() == [place for a, c in ranges for place in range(a, a + c)]


def test_places_that_the_arena_does_not_have_are_never_handed_out() -> None:
    held, at = extents.own(extents.empty(4), 3), 0
    two = np.array([1, 2], dtype=np.int32)
    for hand_out in (
        lambda: extents.own(held, 2),
        lambda: extents.append(held, two),
        lambda: extents.move(held, np.array([at]), np.array([3]), np.array([4])),
    ):
        with pytest.raises(AssertionError, match="does not have"):
            hand_out()
