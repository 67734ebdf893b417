"""Extents: append-only arrays behind immutable states (token histories, block tables, the free queue).

A request owns an extent [at, at + capacity) of one flat int32 arena. Each state bounds, by its own count, how much of
the extent may be read. Appending writes only places that no earlier state may read, so history is never copied.
When a state that is not the arena's newest is written for the first time (two futures of one past), it gets its own
arena, so old states stay valid whatever is folded later. Places are never reused within an arena; a full arena is
replaced by a new one that holds the live extents only.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Arena:
    """The mutable store behind Extents, written only by this module. `version` is that of the newest Extents over it."""

    __slots__ = ("data", "version")

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.version = 0


class Extents(msgspec.Struct, frozen=True):
    """One version of an arena. Places below `used` have been handed out."""

    arena: Arena
    used: int
    version: int

    @property
    def capacity(self) -> int:
        return len(self.arena.data)


def new_places(count: int) -> np.ndarray:
    """Memory for an arena, int32[count]; its initial contents are undefined."""
    return np.empty(count, dtype=np.int32)


def empty(capacity: int) -> Extents:
    return Extents(Arena(new_places(capacity)), 0, 0)


def read(extents: Extents, at: int, count: int) -> np.ndarray:
    """Places [at, at + count) as a read-only int32 view."""
    values = extents.arena.data[at : at + count]
    values.setflags(write=False)
    return values


def gather(extents: Extents, places: np.ndarray) -> np.ndarray:
    """The values at `places` (int64[n] -> int32[n]), copied."""
    return extents.arena.data.take(places)


def write(extents: Extents, places: np.ndarray | slice, values: np.ndarray) -> Extents:
    """Write `values` at `places`, which no existing state may read."""
    arena = extents.arena
    if extents.version != arena.version:
        arena = Arena(arena.data.copy())
    arena.data[places] = values
    arena.version += 1
    return Extents(arena, extents.used, arena.version)


def append(extents: Extents, values: np.ndarray) -> Extents:
    """Hand out the next places, which must fit, and write `values` there."""
    owned = own(extents, len(values))
    owned.arena.data[extents.used : owned.used] = values
    return owned


def own(extents: Extents, more: int = 0) -> Extents:
    """A new version, with `more` places handed out, which must fit (see `compact`), whose arena the caller may append to without
    `write`, under the same rule: two futures of one state never hand out the same places of one arena."""
    used = extents.used + more
    assert used <= extents.capacity, "places are handed out that the arena does not have"
    arena = extents.arena
    if extents.version != arena.version:
        arena = Arena(arena.data.copy())
    arena.version += 1
    return Extents(arena, used, arena.version)


def compact(extents: Extents, at: np.ndarray, counts: np.ndarray, sizes: np.ndarray, extra: int) -> tuple[Extents, np.ndarray]:
    """A new arena with the live extents (`counts` values in `sizes` places each) and room for `extra` more places.

    Also returns the new places of the extents. The new capacity is at least twice the live size, so that many
    reservations share the cost of copying.
    """
    starts = np.cumsum(sizes) - sizes
    used = int(sizes.sum())
    data = new_places(max(extents.capacity, 2 * (used + extra)))
    _copy(extents.arena.data, at, data, starts, counts)
    return Extents(Arena(data), used, 0), starts


def move(extents: Extents, at: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[Extents, np.ndarray]:
    """Move only these extents to new places of the given sizes, which must fit (see `compact`).

    Arrays are int64[n]. Also returns the new places. The cost depends on the moved extents only.
    """
    starts = extents.used + np.cumsum(sizes) - sizes
    moved = own(extents, int(sizes.sum()))
    _copy(extents.arena.data, at, moved.arena.data, starts, counts)
    return moved, starts


def _copy(old: np.ndarray, at: np.ndarray, new: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
    for source, target, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
        new[target : target + count] = old[source : source + count]


def spans(at: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places of several ranges, one after another: at[0].., at[1].. (int64[sum(counts)])."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    firsts: np.ndarray = np.repeat(at - (ends - counts), counts)
    return firsts + np.arange(total, dtype=np.int64)
