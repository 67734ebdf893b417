"""The disk index: which blocks are on disk, oldest first, with every version valid (see versions.py).

Owns the names and their order. Which of them leaves is a decision (vnext/sched/tiering.py). Costs what changes, not what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vnext.state.store.versions import VersionedMap


class DiskIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`stamp_of` and `name_at` mirror each other; stamps lie in [first, next), and a larger one is newer."""

    stamp_of: VersionedMap[bytes, int]
    name_at: VersionedMap[int, bytes]
    first: int
    next: int

    def __len__(self) -> int:
        return len(self.stamp_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self.stamp_of

    def oldest_first(self) -> Iterator[bytes]:
        """The names in order. Read them before another version is made."""
        for stamp in range(self.first, self.next):
            if (name := self.name_at.get(stamp)) is not None:
                yield name

    def without(self, names: Iterable[bytes]) -> DiskIndex:
        """The index without these names. Raises KeyError if one is missing."""
        gone = {name: self.stamp_of[name] for name in names}
        if not gone:
            return self
        name_at, first = self.name_at.without(gone.values()), self.first
        while first < self.next and first not in name_at:
            first += 1
        return DiskIndex(stamp_of=self.stamp_of.without(gone), name_at=name_at, first=first, next=self.next)

    def with_newest(self, names: Iterable[bytes]) -> DiskIndex:
        """The index in which these names are the newest, in this order; those that it has already move."""
        numbers = {name: self.next + at for at, name in enumerate(dict.fromkeys(names))}
        if not numbers:
            return self
        rest = self.without(name for name in numbers if name in self.stamp_of)
        return DiskIndex(
            stamp_of=rest.stamp_of.with_items(numbers),
            name_at=rest.name_at.with_items({stamp: name for name, stamp in numbers.items()}),
            first=rest.first,
            next=self.next + len(numbers),
        )


def disk_index_of(names: Iterable[bytes]) -> DiskIndex:
    """The index of these names, oldest first."""
    return DiskIndex(stamp_of=VersionedMap(), name_at=VersionedMap(), first=0, next=0).with_newest(names)
