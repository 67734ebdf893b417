"""Pins: which pages stay in the prefix cache, and until when, with every version valid (see versions.py).

Owns the ends and their order: the pin that is nearest to its end leaves first, and of pins that end together the one deepest in its
prefix, so that the beginning of a prefix outlives its end. Who holds the pages is the pool's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from vnext.state.store.versions import VersionedArray

DEPTHS = 1 << 20
"""More blocks than a request has."""

Ending = Literal["expired", "displaced", "yielded", "dropped"]
"""How a pin ends; the name of its counter."""


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """`ends` int64[N] of each page: the second at which its pin ends times DEPTHS, plus what orders pins that end together; 0 for a
    page without a pin.

    `count` pages are pinned, and `pinned` have been. Of those, pins have `expired`, were `displaced` by others that last longer,
    have `yielded` to a request that nothing else served, or were `dropped` with everything that the cache held.
    """

    ends: VersionedArray
    count: int = 0
    pinned: int = 0
    expired: int = 0
    displaced: int = 0
    yielded: int = 0
    dropped: int = 0

    def first_to_leave(self) -> np.ndarray:
        """The pinned pages in the order in which their pins end (int32[count])."""
        ends = self.ends.values()
        pages = np.flatnonzero(ends)
        return pages[np.argsort(ends[pages], kind="stable")].astype(np.int32)

    def next_end(self) -> int:
        """The second at which the next pin ends; there must be one."""
        ends = self.ends.values()
        return int(ends[np.flatnonzero(ends)].min()) // DEPTHS

    def over(self, seconds: int) -> np.ndarray:
        """The pages whose pins have ended by this second, in order (int32[n])."""
        pages = self.first_to_leave()
        return pages[self.ends.at(pages) // DEPTHS <= seconds]

    def with_ends(self, pages: np.ndarray, ends: np.ndarray) -> Pins:
        """With these ends (int64[n]) of pages (int32[n], each once), unless a page's own end is later."""
        before = self.ends.at(pages)
        new, later = int(np.count_nonzero(before == 0)), ends > before
        longer = self.ends.set(pages[later], ends[later])
        return msgspec.structs.replace(self, ends=longer, count=self.count + new, pinned=self.pinned + new)

    def without(self, pages: np.ndarray, ending: Ending) -> Pins:
        """Without the pins of these pages (int32[n], each pinned)."""
        changes = {"count": self.count - len(pages), ending: getattr(self, ending) + len(pages)}
        return msgspec.structs.replace(self, ends=self.ends.set(pages, np.zeros(len(pages), np.int64)), **changes)

    def emptied(self) -> Pins:
        """Without any pin, in a pool of new pages."""
        none = VersionedArray(np.zeros(len(self.ends), np.int64))
        return msgspec.structs.replace(self, ends=none, count=0, dropped=self.dropped + self.count)


def no_pins(page_count: int) -> Pins:
    """The pins of a pool in which no page was ever pinned."""
    return Pins(ends=VersionedArray(np.zeros(page_count, np.int64)))


def ends_of(blocks: int, seconds: int) -> np.ndarray:
    """The ends of the pins of a prefix's first blocks, all at this second (int64[blocks])."""
    depths: np.ndarray = seconds * DEPTHS + DEPTHS - 1 - np.minimum(np.arange(blocks), DEPTHS - 1)
    return depths
