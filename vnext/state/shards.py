"""Shards: a persistent mapping, cut into small dicts of which only the touched ones are copied.

An update costs the size of one shard and the tuple of shards, whatever the whole holds; unchanged shards are the same
objects in both versions. Keys are ints or bytes whose first byte is evenly spread. Order is never observable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

SHARD_COUNT = 256
Key = TypeVar("Key", int, bytes)
Value = TypeVar("Value")


def _shard_of(key: int | bytes) -> int:
    return key & (SHARD_COUNT - 1) if isinstance(key, int) else key[0]


class Shards(Generic[Key, Value]):
    """An immutable mapping. `with_items` and `without` return new ones and leave this as it is."""

    __slots__ = ("_dicts", "_count")

    def __init__(self, dicts: tuple[dict[Key, Value], ...] | None = None, count: int = 0) -> None:
        self._dicts = dicts if dicts is not None else ({},) * SHARD_COUNT
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        return key in self._dicts[_shard_of(key)]

    def __getitem__(self, key: Key) -> Value:
        return self._dicts[_shard_of(key)][key]

    def get(self, key: Key) -> Value | None:
        return self._dicts[_shard_of(key)].get(key)

    def items(self) -> Iterator[tuple[Key, Value]]:
        for shard in self._dicts:
            yield from shard.items()

    def with_items(self, items: Iterable[tuple[Key, Value]]) -> Shards[Key, Value]:
        dicts, touched, count = list(self._dicts), set(), self._count
        for key, value in items:
            shard = self._own(dicts, touched, key)
            count += key not in shard
            shard[key] = value
        return Shards(tuple(dicts), count) if touched else self

    def without(self, keys: Iterable[Key]) -> Shards[Key, Value]:
        dicts, touched, count = list(self._dicts), set(), self._count
        for key in keys:
            del self._own(dicts, touched, key)[key]
            count -= 1
        return Shards(tuple(dicts), count) if touched else self

    @staticmethod
    def _own(dicts: list[dict[Key, Value]], touched: set[int], key: Key) -> dict[Key, Value]:
        place = _shard_of(key)
        if place not in touched:
            touched.add(place)
            dicts[place] = dicts[place].copy()
        return dicts[place]
