"""Versions: arrays and mappings of which every version stays valid, at the cost of what changed.

Baker's shallow binding ("Shallow Binding Makes Functional Arrays Fast", 1991): the newest version owns the store, every
older one remembers only how it differs from the version after it. Reading or changing an older version first turns the
differences round, so that the store is its own; going back and forth between neighbours costs what they differ in.
Nobody pays for versions that nobody holds: older ones point at newer ones, never the other way.
What is seen of a version never changes. One thread uses all versions of one store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from vnext.state import columns

Key = TypeVar("Key")
Value = TypeVar("Value")
_Change = tuple[tuple[Any, ...], dict[Any, Any]]  # keys that go, pairs that come
_WORD = 2**64 - 1


class Version:
    """A place in a chain of versions: `_store` in the newest, `_undo` and `_next` in all others. A kind of version says how
    its store is changed (`_apply`)."""

    __slots__ = ("_next", "_store", "_undo")

    def __init__(self, store: Any) -> None:
        self._store = store
        self._undo: Any = None
        self._next: Version | None = None

    def _apply(self, store: Any, undo: Any) -> Any:
        """Change the store by an undo record; returns the record that changes it back."""
        raise TypeError("a version is an array or a mapping")

    def _own(self) -> Any:
        """The store, made this version's."""
        if self._store is None:
            chain = []
            node: Version = self
            while node._store is None:
                chain.append(node)
                node = node._next
            for earlier in reversed(chain):
                node._pass_to(earlier)
                node = earlier
        return self._store

    def donated(self) -> Any:
        """The store itself, from a caller that alone holds this version and gives it up: no version of it is seen again."""
        return self._own()

    def _pass_to(self, earlier: Version) -> None:
        store = self._store
        self._undo, self._next, self._store = self._apply(store, earlier._undo), earlier, None
        earlier._store, earlier._undo, earlier._next = store, None, None

    def _succeeded_by(self, newer: Version, undo: Any) -> None:
        self._store, self._undo, self._next = None, undo, newer


class VersionedArray(Version):
    """An int64 array. `set` gives the next version and leaves this one as it is.

    `sum` tells versions apart without reading them: it adds up a number for each value at its place (columns_numpy.mixed)
    and follows each change at the cost of that change.
    """

    __slots__ = ("sum",)

    def __init__(self, values: np.ndarray, sum_: int | None = None) -> None:
        super().__init__(values)
        self.sum = columns.kernels.mixed(values) if sum_ is None else sum_

    def __len__(self) -> int:
        return len(self._own())

    def values(self) -> np.ndarray:
        """The whole array, read-only, to be read at once: valid until another version of it is read or made."""
        view = self._own().view()
        view.flags.writeable = False
        return view

    def at(self, places: np.ndarray) -> np.ndarray:
        """The values at `places`, copied."""
        return self._own()[places]

    def set(self, places: np.ndarray, values: np.ndarray) -> VersionedArray:
        """This array with other values at `places`, no place twice. Takes `values` (int64) over: the caller forgets them."""
        places = np.ascontiguousarray(places, dtype=np.int32)
        store = self._own()
        change = columns.kernels.put(store, places, values)
        newer = VersionedArray(store, (self.sum + change) & _WORD)
        self._succeeded_by(newer, (places, values))
        return newer

    def _apply(self, store: np.ndarray, undo: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        columns.kernels.put(store, *undo)
        return undo


class VersionedMap(Version, Generic[Key, Value]):
    """A mapping. `with_items` and `without` give the next version and leave this one as it is.

    Order is not observable: whatever iterates must not depend on it.
    """

    __slots__ = ("_count",)

    def __init__(self, items: dict[Key, Value] | None = None) -> None:
        super().__init__({} if items is None else items)
        self._count = len(self._store)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        return key in self._own()

    def __getitem__(self, key: Key) -> Value:
        return self._own()[key]

    def get(self, key: Key) -> Value | None:
        return self._own().get(key)

    def get_all(self, keys: Iterable[Key]) -> list[Value | None]:
        """The value of each key, None for one that is not here."""
        return list(map(self._own().get, keys))

    def count(self, keys: Iterable[Key]) -> int:
        """How many of these keys are here."""
        return sum(map(self._own().__contains__, keys))

    def mapping(self) -> Mapping[Key, Value]:
        """The whole mapping, read-only, to be read at once: valid until another version of it is read or made."""
        return MappingProxyType(self._own())

    def items(self) -> Iterator[tuple[Key, Value]]:
        """All pairs, as they are now: valid whatever is done while they are read."""
        return iter(list(self._own().items()))

    def with_items(self, items: dict[Key, Value] | Iterable[tuple[Key, Value]]) -> VersionedMap[Key, Value]:
        """This mapping with these pairs, new or in place of old ones."""
        new = items if isinstance(items, dict) else dict(items)
        store = self._own()
        gone = () if store.keys().isdisjoint(new) else tuple(key for key in new if key in store)
        return self._changed(gone, new)

    def without(self, keys: Iterable[Key]) -> VersionedMap[Key, Value]:
        """This mapping without these keys. KeyError, and nothing changed, for one it does not have."""
        gone, store = tuple(keys), self._own()
        for key in gone:
            if key not in store:
                raise KeyError(key)
        return self._changed(gone, {})

    def _changed(self, gone: tuple[Key, ...], new: dict[Key, Value]) -> VersionedMap[Key, Value]:
        if not gone and not new:
            return self
        store = self._own()
        undo = self._apply(store, (gone, new))
        newer: VersionedMap[Key, Value] = VersionedMap(store)
        self._succeeded_by(newer, undo)
        return newer

    def _apply(self, store: dict[Key, Value], undo: _Change) -> _Change:
        """Take keys out, then put pairs in; a key that gets another value is in both."""
        gone, new = undo
        old = {key: store.pop(key) for key in gone}
        store.update(new)
        return tuple(new), old
