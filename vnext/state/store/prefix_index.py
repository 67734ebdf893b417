"""The prefix index: from block hash to page and back, with every version valid (see versions.py).

Owns which hash belongs to which page; the pool decides whether a page may have one. The operations exist in C and in
Python (prefix_index_plain.py). Both produce the same table; without a compiler, only speed is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from vnext.base.compiled import load
from vnext.state.store import prefix_index_plain
from vnext.state.store.prefix_index_plain import Move, Pair
from vnext.state.store.versions import Version

_prefix_index = load("vnext.state.store._prefix_index")
impl = prefix_index_plain
if not TYPE_CHECKING and _prefix_index is not None:  # the compiled form has the signatures of the plain form
    impl = _prefix_index

Sides = tuple[dict[bytes, int], list[bytes | None]]
Undo = tuple[list[Pair], list[Pair]]


class PrefixIndex(Version[Sides, Undo]):
    """`insert` and `remove` return the next version and do not change this one. The order is not observable."""

    __slots__ = ("_count",)

    def __init__(
        self, blocks: dict[bytes, int], keys: list[bytes | None], older: PrefixIndex | None = None, undo: Undo | None = None
    ) -> None:
        """Takes ownership of both sides, which must mirror each other. `keys` has an entry for each page of the pool."""
        super().__init__((blocks, keys), older, undo)
        self._count = len(blocks)

    def __len__(self) -> int:
        return self._count

    def hash_of(self, block: int) -> bytes | None:
        """The hash of a page; None if it has none or is not a page of the pool."""
        keys = self._own()[1]
        return keys[block] if 0 <= block < len(keys) else None

    def block_of(self, key: bytes) -> int | None:
        return self._own()[0].get(key)

    def blocks_of(self, keys: Iterable[bytes]) -> list[int | None]:
        """The page of each hash, or None."""
        return list(map(self._own()[0].get, keys))

    def count(self, blocks: Iterable[int]) -> int:
        """The number of these pages that have a hash."""
        keys = self._own()[1]
        return sum([keys[block] is not None for block in blocks])

    def named(self) -> int:
        """The number of all pages that have a hash."""
        keys = self._own()[1]
        return len(keys) - keys.count(None)

    def is_mutual(self) -> bool:
        """Whether both sides have the same pairs."""
        blocks, keys = self._own()
        pages = list(blocks.values())
        return self.named() == len(pages) and min(pages, default=0) >= 0 and [keys[page] for page in pages] == list(blocks)

    def blocks(self) -> Mapping[bytes, int]:
        """A read-only mapping from hash to page. It is valid until another version is read or made, so read it at once."""
        return MappingProxyType(self._own()[0])

    def keys(self) -> list[bytes | None]:
        """A list of the hash of every page, None for a page without one. A copy."""
        return self._own()[1].copy()

    def since(self, older: PrefixIndex) -> list[Pair]:
        """The pairs that this version has and that older one, from which it was made, had not; all of its own where it was not."""
        own, came = self._own()[0], dict[bytes, int]()
        node: PrefixIndex | None = older
        while node is not None and node is not self:
            came |= dict(node._undo[0]) if node._undo is not None else {}
            node = node._next
        return [(key, block) for key, block in (own if node is None else came).items() if own.get(key) == block]

    def insert(self, pairs: list[Pair]) -> PrefixIndex:
        """This table with these pairs, except for hashes that already have a page. Takes ownership of the list."""
        store = self._own()
        came = impl.insert(*store, pairs)
        return PrefixIndex(*store, self, (came, [])) if came else self

    def remove(self, taken: np.ndarray) -> PrefixIndex:
        """This table without the hashes of these pages (int32[n])."""
        store = self._own()
        gone = impl.remove(*store, taken)
        return PrefixIndex(*store, self, ([], gone)) if gone else self

    def move(self, moves: list[Move]) -> tuple[PrefixIndex, int]:
        """This table after these moves, one after another, and how many pages have gone. A page that came may not go."""
        store = self._own()
        came, gone = impl.move(*store, moves)
        return PrefixIndex(*store, self, (came, gone)) if came or gone else self, len(gone)

    def _apply(self, store: Sides, undo: Undo) -> Undo:
        gone, come = undo
        impl.apply(*store, gone, come)
        return come, gone


def empty_prefix_index(page_count: int) -> PrefixIndex:
    """The table of a pool in which no page has a hash."""
    return PrefixIndex({}, [None] * page_count)


def prefix_index_of(blocks: dict[bytes, int], page_count: int) -> PrefixIndex:
    """The table with these pairs. Takes ownership of the mapping."""
    keys: list[bytes | None] = [None] * page_count
    for key, block in blocks.items():
        keys[block] = key
    return PrefixIndex(blocks, keys)


def implementation() -> str:
    """The name of the implementation, for `vnext doctor`."""
    return "plain" if impl is prefix_index_plain else "compiled"
