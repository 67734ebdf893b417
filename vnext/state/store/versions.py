"""Versions: arrays and mappings of which every version stays valid, at a cost proportional to the changes.

Baker's shallow binding ("Shallow Binding Makes Functional Arrays Fast", 1991): the newest version owns the store, and
each older version keeps only its difference from the version after it. Reading or changing an older version first
reverses the differences, so that this version owns the store. Moving between neighbours costs as much as they differ.
Older versions point to newer ones, never the reverse, so a version that is no longer referenced costs nothing.
The visible contents of a version never change. All versions of one store must be used from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Generic, Self, TypeVar

import numpy as np

from vnext.state.store import columns

Key = TypeVar("Key")
Value = TypeVar("Value")
Store = TypeVar("Store")
Undo = TypeVar("Undo")
_Change = tuple[tuple[Key, ...], dict[Key, Value]]  # keys to remove, pairs to insert
_WORD = 2**64 - 1


class Version(Generic[Store, Undo]):
    """One version in a chain. The newest has `_store`; all others have `_undo` and `_next`. A subclass defines
    `_apply`, which changes the store.
    """

    __slots__ = ("_next", "_store", "_undo")

    def __init__(self, store: Store, older: Self | None = None, undo: Undo | None = None) -> None:
        """`older`: the version before this one, from which `undo` leads back to it."""
        self._store: Store | None = store
        self._undo: Undo | None = None
        self._next: Self | None = None
        if older is not None:
            older._store, older._undo, older._next = None, undo, self

    def _apply(self, store: Store, undo: Undo) -> Undo:
        """Change the store by an undo record; returns the record that changes it back."""
        raise TypeError("a version is an array or a mapping")

    def _own(self) -> Store:
        """The store, after making this version its owner."""
        return self._turned_round() if self._store is None else self._store

    def _turned_round(self) -> Store:
        chain, node = [], self
        while (store := node._store) is None:
            chain.append(node)
            assert node._next is not None, "a version without a store has a newer one"
            node = node._next
        for earlier in reversed(chain):
            assert earlier._undo is not None, "an older version remembers how it differs"
            node._undo, node._next, node._store = self._apply(store, earlier._undo), earlier, None
            earlier._store, earlier._undo, earlier._next = store, None, None
            node = earlier
        return store


class VersionedArray(Version[np.ndarray, tuple[np.ndarray, np.ndarray]]):
    """An int64 array. `set` returns the next version and does not change this one.

    `hash` identifies the contents without reading them: the sum of the place hashes (columns_numpy.place_hash) of all
    values. A change updates it at a cost proportional to the change.
    """

    __slots__ = ("hash",)

    def __init__(
        self, values: np.ndarray, hash_: int | None = None, older: VersionedArray | None = None,
        undo: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(values, older, undo)
        self.hash = columns.impl.array_hash(values) if hash_ is None else hash_

    def __len__(self) -> int:
        return len(self._own())

    def values(self) -> np.ndarray:
        """The whole array, read-only. It is valid until another version is read or made, so read it at once."""
        view = (self._turned_round() if self._store is None else self._store).view()
        view.setflags(write=False)
        return view

    def at(self, places: np.ndarray) -> np.ndarray:
        """The values at `places`, copied."""
        return self._own().take(places)

    def set(self, places: np.ndarray, values: np.ndarray) -> VersionedArray:
        """This array with other values at `places`, each given once. Takes ownership of `values` (int64)."""
        places = np.ascontiguousarray(places, dtype=np.int32)
        store = self._own()
        change = columns.impl.exchange(store, places, values)
        return VersionedArray(store, (self.hash + change) & _WORD, self, (places, values))

    def _apply(self, store: np.ndarray, undo: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        columns.impl.exchange(store, *undo)
        return undo


class VersionedMap(Version[dict[Key, Value], _Change[Key, Value]], Generic[Key, Value]):
    """A mapping. `with_items` and `without` return the next version and do not change this one.

    The order is not observable: a caller that iterates must not depend on it.
    """

    __slots__ = ("_count",)

    def __init__(
        self, items: dict[Key, Value] | None = None, older: VersionedMap[Key, Value] | None = None,
        undo: _Change[Key, Value] | None = None,
    ) -> None:  # fmt: skip
        store = {} if items is None else items
        super().__init__(store, older, undo)
        self._count = len(store)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        return key in (self._turned_round() if self._store is None else self._store)

    def __getitem__(self, key: Key) -> Value:
        return (self._turned_round() if self._store is None else self._store)[key]

    def get(self, key: Key) -> Value | None:
        return self._own().get(key)

    def count(self, keys: Iterable[Key]) -> int:
        return sum(map(self._own().__contains__, keys))

    def mapping(self) -> Mapping[Key, Value]:
        """The whole mapping, read-only. It is valid until another version is read or made, so read it at once."""
        return MappingProxyType(self._own())

    def items(self) -> list[tuple[Key, Value]]:
        """A list of all pairs. It stays valid whatever happens to the mapping."""
        return list(self._own().items())

    def with_items(self, items: dict[Key, Value] | Iterable[tuple[Key, Value]]) -> VersionedMap[Key, Value]:
        """This mapping with these pairs added or replaced."""
        new = items if isinstance(items, dict) else dict(items)
        store = self._own()
        gone = () if store.keys().isdisjoint(new) else tuple(key for key in new if key in store)
        return self._changed(gone, new)

    def without(self, keys: Iterable[Key]) -> VersionedMap[Key, Value]:
        """This mapping without these keys. Raises KeyError, with nothing changed, if a key is missing."""
        gone, store = tuple(keys), self._own()
        for key in gone:
            if key not in store:
                raise KeyError(key)
        return self._changed(gone, {})

    def _changed(self, gone: tuple[Key, ...], new: dict[Key, Value]) -> VersionedMap[Key, Value]:
        if not gone and not new:
            return self
        store = self._own()
        return VersionedMap(store, self, self._apply(store, (gone, new)))

    def _apply(self, store: dict[Key, Value], undo: _Change[Key, Value]) -> _Change[Key, Value]:
        """Remove keys, then insert pairs. A key whose value changes is in both."""
        gone, new = undo
        old = {key: store.pop(key) for key in gone}
        store.update(new)
        return tuple(new), old
