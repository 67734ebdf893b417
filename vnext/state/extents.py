"""Extents: append-only arrays behind immutable states (token histories, block tables, the free queue).

A request owns an extent [at, at + capacity) of one flat int32 arena and every state bounds, by its own count, how much
of it may be read. Appending writes only places that no earlier state may read, so history is never copied.
A state that is not the arena's newest (two futures of one past) gets an arena of its own on its first write: old
states stay valid whatever is folded afterwards. Places are never reused within an arena; a full arena is replaced by a
fresh one that holds the live extents only.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Arena:
    """The mutable store behind Extents; nobody else writes it. `version` is that of the newest Extents over it."""

    __slots__ = ("data", "version")

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.version = 0


class Extents(msgspec.Struct, frozen=True):
    """One version of an arena: places below `used` are handed out."""

    arena: Arena
    used: int
    version: int

    @property
    def capacity(self) -> int:
        return len(self.arena.data)


def new_places(count: int) -> np.ndarray:
    """Room for an arena, int32[count]; what stands in it before it is written is nobody's."""
    return np.empty(count, dtype=np.int32)


def empty(capacity: int) -> Extents:
    return Extents(Arena(new_places(capacity)), 0, 0)


def read(extents: Extents, at: int, count: int) -> np.ndarray:
    """Places [at, at + count) as a read-only int32 view."""
    values = extents.arena.data[at : at + count]
    values.flags.writeable = False
    return values


def gather(extents: Extents, places: np.ndarray) -> np.ndarray:
    """The values at `places` (int64[n] -> int32[n]), copied."""
    return extents.arena.data[places]


def write(extents: Extents, places: np.ndarray | slice, values: np.ndarray) -> Extents:
    """Append `values` at `places`, none of which an existing state may read."""
    arena = extents.arena
    if extents.version != arena.version:
        arena = Arena(arena.data.copy())
    arena.data[places] = values
    arena.version += 1
    return Extents(arena, extents.used, arena.version)


def own(extents: Extents) -> Extents:
    """A new version whose arena the caller may append to by other means than `write`, under the same rule."""
    return _claim(extents, extents.used)


def reserve(extents: Extents, size: int) -> tuple[Extents, int]:
    """Hand out `size` places; the caller has made sure that they fit (see `compact`)."""
    return _claim(extents, extents.used + size), extents.used


def append(extents: Extents, values: np.ndarray) -> Extents:
    """The next places, handed out and written; the caller has made sure that they fit."""
    owned = _claim(extents, extents.used + len(values))
    owned.arena.data[extents.used : owned.used] = values
    return owned


def _claim(extents: Extents, used: int) -> Extents:
    """A new version, so that two futures of one state never hand out the same places of one arena."""
    arena = extents.arena
    if extents.version != arena.version:
        arena = Arena(arena.data.copy())
    arena.version += 1
    return Extents(arena, used, arena.version)


def compact(extents: Extents, at: np.ndarray, counts: np.ndarray, sizes: np.ndarray, extra: int) -> tuple[Extents, np.ndarray]:
    """A fresh arena with the live extents (`counts` values of `sizes` places each) and room for `extra` places more.

    Returns it with the extents' new places. The new capacity is at least twice what is live, so that the cost of
    copying is spread over as many reservations.
    """
    starts = np.cumsum(sizes) - sizes
    used = int(sizes.sum())
    data = new_places(max(extents.capacity, 2 * (used + extra)))
    _copy(extents.arena.data, at, data, starts, counts)
    return Extents(Arena(data), used, 0), starts


def move(extents: Extents, at: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[Extents, np.ndarray]:
    """These extents alone, at new places of the given sizes; the caller has made sure that they fit (see `compact`).

    Arrays are int64[n]. Returns the new places too. What it costs depends on the moved ones only.
    """
    starts = extents.used + np.cumsum(sizes) - sizes
    moved = _claim(extents, extents.used + int(sizes.sum()))
    _copy(extents.arena.data, at, moved.arena.data, starts, counts)
    return moved, starts


def _copy(old: np.ndarray, at: np.ndarray, new: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
    for source, target, count in zip(at.tolist(), starts.tolist(), counts.tolist(), strict=True):
        new[target : target + count] = old[source : source + count]


def spans(at: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Places of several ranges one after the other: at[0].., at[1].. (int64[sum(counts)])."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(at - (ends - counts), counts)
