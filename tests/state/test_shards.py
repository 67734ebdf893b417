"""Shards: a persistent mapping that is equal to a dict, in every version."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from vnext.state.shards import SHARD_COUNT, Shards

KEYS = st.one_of(st.integers(0, 3 * SHARD_COUNT))
CHANGES = st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=6), st.integers()), max_size=20)


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_every_version_is_its_dict(changes: list[tuple[bool, list[int], int]]) -> None:
    versions: list[tuple[Shards, dict]] = [(Shards(), {})]
    for adds, keys, value in changes:
        shards, plain = versions[-1]
        if adds:
            versions.append((shards.with_items((key, value) for key in keys), {**plain, **dict.fromkeys(keys, value)}))
        else:
            gone = {key for key in keys if key in plain}
            versions.append((shards.without(sorted(gone)), {k: v for k, v in plain.items() if k not in gone}))
    for shards, plain in versions:
        assert dict(shards.items()) == plain and len(shards) == len(plain)
        assert all(key in shards and shards[key] == value and shards.get(key) == value for key, value in plain.items())


def test_what_is_missing_is_missing() -> None:
    shards = Shards().with_items([(b"\x07key", 1)])
    assert b"\x07other" not in shards and shards.get(b"\x08") is None
    with pytest.raises(KeyError):
        shards[b"\x07other"]
    with pytest.raises(KeyError):
        shards.without([b"\x07other"])


def test_unchanged_means_the_same_object() -> None:
    shards = Shards().with_items([(1, "a")])
    assert shards.with_items([]) is shards and shards.without([]) is shards


def test_only_touched_shards_are_copied() -> None:
    shards = Shards().with_items([(number, number) for number in range(SHARD_COUNT)])
    other = shards.with_items([(3, "new"), (3 + SHARD_COUNT, "new")])
    copied = [place for place in range(SHARD_COUNT) if shards._dicts[place] is not other._dicts[place]]
    assert copied == [3]
