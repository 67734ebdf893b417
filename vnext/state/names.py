"""Names: the prefix table, both ways, of which every version stays valid (see versions.py).

Owns which key belongs to which block. Whether a block may have one is the pool's business. The moves exist twice, compiled
and plain (names_plain.py); both give the same table, a machine without a compiler loses time, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType

import numpy as np

from vnext.state import names_plain
from vnext.state.names_plain import Pair
from vnext.state.versions import Version

try:
    from vnext.state import _names
except ImportError:  # not built: no compiler when vnext was installed
    _names = None

kernels: ModuleType = names_plain if _names is None else _names
Sides = tuple[dict[bytes, int], list[bytes | None]]
Undo = tuple[list[Pair], list[Pair]]


class Names(Version):
    """`offered` and `without` give the next version and leave this one as it is. Order is not observable."""

    __slots__ = ("_count",)

    def __init__(self, blocks: dict[bytes, int], keys: list[bytes | None]) -> None:
        """Takes both sides over; they mirror each other. `keys` has a place for each block of the pool."""
        super().__init__((blocks, keys))
        self._count = len(blocks)

    def __len__(self) -> int:
        return self._count

    def key_of(self, block: int) -> bytes | None:
        """None as well for what is no block of the pool."""
        keys = self._own()[1]
        return keys[block] if 0 <= block < len(keys) else None

    def block_of(self, key: bytes) -> int | None:
        return self._own()[0].get(key)

    def blocks_of(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each key, None for one that has none."""
        return list(map(self._own()[0].get, keys))

    def count(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have a name."""
        keys = self._own()[1]
        return sum([keys[block] is not None for block in blocks])

    def blocks(self) -> Mapping[bytes, int]:
        """Key -> block, read-only, to be read at once: valid until another version of it is read or made."""
        return MappingProxyType(self._own()[0])

    def keys(self) -> list[bytes | None]:
        """The key of every block, None where it has none: a copy."""
        return self._own()[1].copy()

    def offered(self, pairs: list[Pair]) -> Names:
        """This table with these pairs, but for keys that have a block. Takes the list over: the caller forgets it."""
        store = self._own()
        came = kernels.offer(*store, pairs)
        return self._followed(store, (came, [])) if came else self

    def without(self, taken: np.ndarray) -> Names:
        """This table without the names of these blocks (int32[n])."""
        store = self._own()
        gone = kernels.forget(*store, taken)
        return self._followed(store, ([], gone)) if gone else self

    def _followed(self, store: Sides, undo: Undo) -> Names:
        newer = Names.__new__(Names)
        Version.__init__(newer, store)
        newer._count = len(store[0])
        self._succeeded_by(newer, undo)
        return newer

    def _apply(self, store: Sides, undo: Undo) -> Undo:
        gone, come = undo
        kernels.change(*store, gone, come)
        return come, gone


def no_names(block_count: int) -> Names:
    """The table of a pool in which nothing has a name."""
    return Names({}, [None] * block_count)


def names_of(blocks: dict[bytes, int], block_count: int) -> Names:
    """The table with these pairs; takes the mapping over."""
    keys: list[bytes | None] = [None] * block_count
    for key, block in blocks.items():
        keys[block] = key
    return Names(blocks, keys)


def implementation() -> str:
    """For `vnext doctor`."""
    return "plain" if kernels is names_plain else "compiled"
