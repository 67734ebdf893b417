"""Blocks: who holds which page of the key-value cache, and which content a page still has.

Owns allocation, sharing, release, eviction and the prefix table. Knows nothing of devices, texts or time.
A block is free (no holder), held (one or more holders) or kept (no holder, content still named for reuse):
    free + held + kept == block_count          always; see laws.py
Free and kept blocks wait in one queue and leave it oldest first, so every replica evicts the same block. The queue is
append-only: a block that was revived from its middle leaves a stale place behind, known by its own place.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import columns, extents
from vnext.state.extents import Extents
from vnext.state.names import Names, no_names
from vnext.state.versions import VersionedArray

HELD = -1


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """`status` int64[N] of each block: its place in the queue, or minus the number of its holders.

    The queue is the range [head, queue.used) of an arena; `free` counts its valid places and `kept` those of them whose
    content still has a name. `names` is the prefix table. A change costs what it changes, not what the pool holds.
    """

    status: VersionedArray
    queue: Extents
    head: int
    free: int
    kept: int
    names: Names

    @property
    def block_count(self) -> int:
        return len(self.status)

    @property
    def ref(self) -> np.ndarray:
        """Holders of all blocks (int64[N])."""
        return np.maximum(-self.status.values(), 0)

    @property
    def place(self) -> np.ndarray:
        """Places of all blocks in the queue, HELD for those that have a holder (int64[N])."""
        return np.maximum(self.status.values(), HELD)


def new_pool(block_count: int) -> Pool:
    """All blocks free, in order of their numbers."""
    queue = extents.write(extents.empty(4 * block_count), slice(0, block_count), np.arange(block_count, dtype=np.int32))
    queue, _ = extents.reserve(queue, block_count)
    return Pool(
        status=VersionedArray(np.arange(block_count)), queue=queue, head=0, free=block_count, kept=0,
        names=no_names(block_count),
    )  # fmt: skip


def free_blocks(pool: Pool) -> np.ndarray:
    """Free and kept blocks in the order in which they will be taken (int32[free])."""
    waiting = extents.read(pool.queue, pool.head, pool.queue.used - pool.head)
    return waiting[pool.status.at(waiting) == np.arange(pool.head, pool.queue.used)]


def take(pool: Pool, count: int) -> tuple[Pool, np.ndarray]:
    """The `count` oldest free blocks with one holder each (int32[count]); their content loses its name."""
    if count == 0:
        return pool, np.empty(0, dtype=np.int32)
    blocks, head = _oldest(pool, count)
    status = pool.status.set(blocks, np.full(count, HELD))
    taken = _replace(pool, status=status, head=head, free=pool.free - count)
    return _forget(taken, blocks) if pool.kept else taken, blocks


def _oldest(pool: Pool, count: int) -> tuple[np.ndarray, int]:
    """The first `count` valid places of the queue and the head behind them."""
    blocks = np.empty(count, dtype=np.int32)
    head = columns.kernels.oldest(pool.queue.arena.data, pool.status.values(), pool.head, pool.queue.used, blocks)
    return blocks, head


def hold(pool: Pool, blocks: np.ndarray) -> Pool:
    """One more holder for each block (no block twice); a kept block is revived and leaves the queue."""
    if len(blocks) == 0:
        return pool
    before = pool.status.at(blocks)
    revived = int(np.count_nonzero(before >= 0))
    status = pool.status.set(blocks, np.minimum(before, 0) - 1)
    return _replace(pool, status=status, free=pool.free - revived, kept=pool.kept - revived)


def release(pool: Pool, blocks: np.ndarray) -> Pool:
    """One holder less for each block (no block twice); those without any join the queue in the given order.

    Callers give a request's blocks last first: the tail of a prefix is evicted before its beginning.
    """
    if len(blocks) == 0:
        return pool
    if pool.queue.used + len(blocks) > pool.queue.capacity:
        pool = _tidy_queue(pool)
    blocks = np.ascontiguousarray(blocks)
    left, freed = np.empty(len(blocks), dtype=np.int64), np.empty(len(blocks), dtype=np.int32)
    count = columns.kernels.released(pool.status.values(), blocks, pool.queue.used, left, freed)
    status = pool.status.set(blocks, left)
    if count == 0:
        return _replace(pool, status=status)
    kept = pool.kept + pool.names.count(freed[:count].tolist())
    queue = extents.append(pool.queue, freed[:count])
    return _replace(pool, status=status, queue=queue, free=pool.free + count, kept=kept)


def _tidy_queue(pool: Pool) -> Pool:
    """The same queue without stale places, in a fresh arena."""
    blocks = free_blocks(pool)
    fresh = extents.empty(pool.queue.capacity)
    queue, _ = extents.reserve(extents.write(fresh, slice(0, len(blocks)), blocks), len(blocks))
    return _replace(pool, queue=queue, status=pool.status.set(blocks, np.arange(len(blocks))), head=0)


def name(pool: Pool, pairs: list[tuple[bytes, int]]) -> Pool:
    """Offer full blocks for reuse under their chain keys; a key that has a block already keeps that one.

    Takes the list over: the caller forgets it.
    """
    return _replace(pool, names=pool.names.offered(pairs))


def named_blocks(pool: Pool) -> dict[bytes, int]:
    """The prefix table one way: key -> block."""
    return dict(pool.names.blocks())


def _forget(pool: Pool, blocks: np.ndarray) -> Pool:
    """These blocks, which have just been taken, lose the names they were kept under."""
    names = pool.names.without(blocks)
    return _replace(pool, names=names, kept=pool.kept - (len(pool.names) - len(names)))


def forget_all(pool: Pool) -> Pool:
    return _replace(pool, names=no_names(pool.block_count), kept=0)


def longest_prefix(pool: Pool, keys: tuple[bytes, ...], block_count_max: int) -> np.ndarray:
    """Blocks that hold the leading `keys`, at most `block_count_max` of them (int32[n])."""
    wanted = keys[:block_count_max]
    if not wanted or pool.names.block_of(wanted[0]) is None:  # the usual miss costs one question
        return np.empty(0, dtype=np.int32)
    blocks = pool.names.blocks_of(wanted)
    if None in blocks:
        del blocks[blocks.index(None) :]
    return np.array(blocks, dtype=np.int32)


def _replace(pool: Pool, **changes: object) -> Pool:
    return msgspec.structs.replace(pool, **changes)
