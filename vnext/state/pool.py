"""Pages: who holds each page of the key-value cache, and which content a page still has.

Owns allocation, sharing, release, eviction and the prefix index. Knows nothing of devices, texts or time.
A page is free (no holder), held (one or more holders) or kept (no holder, but content still indexed for reuse):
    free + held + kept == page_count          always; see laws.py
Free and kept pages wait in one queue and leave it oldest first, so every replica evicts the same page. The queue is
append-only: a page that is revived from its middle leaves a stale place behind, which no longer equals the page's own.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.store import columns, extents
from vnext.state.store.extents import Extents
from vnext.state.store.pins import Ending, Pins, no_pins
from vnext.state.store.prefix_index import PrefixIndex, empty_prefix_index
from vnext.state.store.prefix_index_plain import Move
from vnext.state.store.versions import VersionedArray

HELD = -1


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """`status` int64[N] of each page: its place in the queue, or minus the number of its holders.

    The queue is the range [head, queue.used) of an arena; `free` counts its valid places and `kept` those whose content
    is still in `prefix_index`. The cost of a change depends on the change, not on the size of the pool. A pin is one more holder of
    its page; `pins` are None before the first. `states` are the pages for states of recurrent layers, of which the kept ones
    are snapshots (recurrent.py); None without such layers.
    """

    status: VersionedArray
    queue: Extents
    head: int
    free: int
    kept: int
    prefix_index: PrefixIndex
    pins: Pins | None = None
    states: Pool | None = None

    @property
    def page_count(self) -> int:
        return len(self.status)

    @property
    def ref(self) -> np.ndarray:
        """The number of holders of every page (int64[N])."""
        holders: np.ndarray = np.maximum(-self.status.values(), 0)
        return holders

    @property
    def place(self) -> np.ndarray:
        """The place of every page in the queue, HELD for those that have a holder (int64[N])."""
        places: np.ndarray = np.maximum(self.status.values(), HELD)
        return places


def new_pool(page_count: int, before: Pins | None = None, state_pages: int = 0) -> Pool:
    """A pool with all pages free, in numerical order. `before`: the pins of the pool in whose place it is."""
    queue = extents.write(extents.empty(4 * page_count), slice(0, page_count), np.arange(page_count, dtype=np.int32))
    return Pool(
        status=VersionedArray(np.arange(page_count)), queue=extents.own(queue, page_count), head=0, free=page_count, kept=0,
        prefix_index=empty_prefix_index(page_count), pins=before and before.emptied(),
        states=new_pool(state_pages) if state_pages else None,
    )  # fmt: skip


def free_blocks(pool: Pool) -> np.ndarray:
    """Free and kept pages in the order in which they will be taken (int32[free])."""
    waiting = extents.read(pool.queue, pool.head, pool.queue.used - pool.head)
    return waiting.compress(pool.status.at(waiting) == np.arange(pool.head, pool.queue.used))


def take(pool: Pool, count: int) -> tuple[Pool, np.ndarray]:
    """The `count` oldest free pages, with one holder each (int32[count]). They leave the prefix index."""
    if count == 0:
        return pool, np.empty(0, dtype=np.int32)
    blocks, head = _oldest(pool, count)
    return taken(pool, blocks, head), blocks


def taken(pool: Pool, blocks: np.ndarray, head: int) -> Pool:
    """The pool after its oldest free pages, `blocks` (int32[n], kept), were taken, which leave the prefix index; `head` is the
    queue's new head."""
    status, prefix_index, kept = _held(pool, blocks), pool.prefix_index, pool.kept
    if kept:
        prefix_index = prefix_index.remove(blocks)
        kept -= len(pool.prefix_index) - len(prefix_index)
    return _replace(pool, status=status, head=head, free=pool.free - len(blocks), prefix_index=prefix_index, kept=kept)


def _held(pool: Pool, blocks: np.ndarray) -> VersionedArray:
    count = len(blocks)
    return pool.status.set(blocks, np.full(count, HELD))


def moved(pool: Pool, blocks: np.ndarray, head: int, moves: list[Move]) -> Pool:
    """The pool after several turns took its oldest free pages, `blocks` (int32[n], kept), with the queue's new head, and the prefix
    index went through these moves."""
    prefix_index, gone = pool.prefix_index.move(moves)
    status, free = _held(pool, blocks) if len(blocks) else pool.status, pool.free - len(blocks)
    return _replace(pool, status=status, head=head, free=free, prefix_index=prefix_index, kept=pool.kept - gone)


def _oldest(pool: Pool, count: int) -> tuple[np.ndarray, int]:
    """The pages at the first `count` valid places of the queue, and the head behind them."""
    blocks = np.empty(count, dtype=np.int32)
    head = columns.impl.oldest(pool.queue.arena.data, pool.status.values(), pool.head, pool.queue.used, blocks)
    return blocks, head


def head_after(pool: Pool, count: int) -> int:
    """The queue's head when its `count` oldest pages have been taken: kept pages at places before it lose their content."""
    return _oldest(pool, count)[1]


def hold(pool: Pool, blocks: np.ndarray) -> Pool:
    """Add one holder to each page (each given once). A kept page is revived and leaves the queue."""
    if len(blocks) == 0:
        return pool
    before = pool.status.at(blocks)
    revived = int(np.count_nonzero(before >= 0))
    status = pool.status.set(blocks, np.minimum(before, 0) - 1)
    return _replace(pool, status=status, free=pool.free - revived, kept=pool.kept - revived)


def release(pool: Pool, blocks: np.ndarray) -> Pool:
    """Remove one holder from each page (each given once). Pages without holders join the queue in the given order.

    Callers pass a request's pages last first, so the end of a prefix is evicted before its beginning.
    """
    if len(blocks) == 0:
        return pool
    if pool.queue.used + len(blocks) > pool.queue.capacity:
        pool = _tidy_queue(pool)
    blocks = np.ascontiguousarray(blocks)
    left, freed = np.empty(len(blocks), dtype=np.int64), np.empty(len(blocks), dtype=np.int32)
    count = columns.impl.released(pool.status.values(), blocks, pool.queue.used, left, freed)
    status = pool.status.set(blocks, left)
    if count == 0:
        return _replace(pool, status=status)
    kept = pool.kept + pool.prefix_index.count(freed[:count].tolist())
    queue = extents.append(pool.queue, freed[:count])
    return _replace(pool, status=status, queue=queue, free=pool.free + count, kept=kept)


def _tidy_queue(pool: Pool) -> Pool:
    """The same queue without stale places, in a new arena."""
    blocks = free_blocks(pool)
    fresh = extents.empty(pool.queue.capacity)
    queue = extents.own(extents.write(fresh, slice(0, len(blocks)), blocks), len(blocks))
    return _replace(pool, queue=queue, status=pool.status.set(blocks, np.arange(len(blocks))), head=0)


def insert_hashes(pool: Pool, pairs: list[tuple[bytes, int]]) -> Pool:
    """Insert full blocks into the prefix index under their block hashes. A hash that already has a page keeps it.

    Takes ownership of the list.
    """
    return _replace(pool, prefix_index=pool.prefix_index.insert(pairs))


def indexed_since(pool: Pool, older: Pool) -> list[tuple[bytes, int]]:
    """The full blocks, as (hash, page), that the prefix index has and had not in an earlier pool of the same engine."""
    return pool.prefix_index.since(older.prefix_index)


def pin(pool: Pool, pages: np.ndarray, ends: np.ndarray, page_count_max: int) -> Pool:
    """Pin indexed pages (int32[n], each once) until `ends` (int64[n], see pins.py). Where more than `page_count_max` are pinned
    then, those that end first are not any more."""
    pins = pool.pins or no_pins(pool.page_count)
    new = pages[pins.ends.at(pages) == 0]
    pins = pins.with_ends(pages, ends)
    pool = _replace(hold(pool, new), pins=pins)
    excess = pins.count - page_count_max
    return unpin(pool, pins.first_to_leave()[:excess], "displaced") if excess > 0 else pool


def unpin(pool: Pool, pages: np.ndarray, ending: Ending) -> Pool:
    """End the pins of these pages (int32[n], each pinned). Those that nobody else holds join the queue in the given order."""
    if pool.pins is None or len(pages) == 0:
        return pool
    return _replace(release(pool, pages), pins=pool.pins.without(pages, ending))


def is_pinned(pool: Pool, page: int) -> bool:
    return pool.pins is not None and bool(pool.pins.ends.at(np.array([page], dtype=np.int32))[0] > 0)


def pinned_count(pool: Pool) -> int:
    return 0 if pool.pins is None else pool.pins.count


def pinned_pages(pool: Pool) -> np.ndarray:
    """The pinned pages in the order in which their pins end (int32[n])."""
    return np.empty(0, dtype=np.int32) if pool.pins is None else pool.pins.first_to_leave()


def without_pins(pool: Pool) -> Pool:
    """The pool in which every pin is over, because what it keeps is never a hit again."""
    if pool.states is not None:
        pool = _replace(pool, states=without_pins(pool.states))
    return unpin(pool, pinned_pages(pool), "dropped")


def clear_prefix_index(pool: Pool) -> Pool:
    """The pool without any content for reuse, and so without pins."""
    pool = without_pins(pool)
    states = pool.states and clear_prefix_index(pool.states)
    return _replace(pool, states=states, prefix_index=empty_prefix_index(pool.page_count), kept=0)


def without_name(pool: Pool, *pages: int) -> Pool:
    """The pool in which these held pages have no names."""
    return _replace(pool, prefix_index=pool.prefix_index.remove(np.array(pages, dtype=np.int32)))


def longest_prefix(pool: Pool, keys: tuple[bytes, ...], page_count_max: int) -> np.ndarray:
    """The pages that hold the leading blocks with these hashes, at most `page_count_max` of them (int32[n])."""
    wanted = keys[:page_count_max]
    if not wanted or pool.prefix_index.block_of(wanted[0]) is None:  # the usual miss costs one lookup
        return np.empty(0, dtype=np.int32)
    blocks = pool.prefix_index.blocks_of(wanted)
    if None in blocks:
        del blocks[blocks.index(None) :]
    return np.array(blocks, dtype=np.int32)


def _replace(pool: Pool, **changes: object) -> Pool:
    return msgspec.structs.replace(pool, **changes)
