"""The block pool against a naive model: holders, the queue's order, the prefix table, old versions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.state import pool as pools
from vnext.state.pool import Pool, free_blocks, new_pool
from vnext.state.store import columns, columns_numpy
from vnext.state.store.versions import VersionedArray

BLOCK_COUNT = 6


class Naive:
    """The pool as plain lists and dicts, written for clarity only."""

    def __init__(self) -> None:
        self.holders = [0] * BLOCK_COUNT
        self.queue = list(range(BLOCK_COUNT))
        self.names: dict[bytes, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.holders[block] = 1
        self.names = {key: block for key, block in self.names.items() if block not in taken}
        return taken

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] += 1
        self.queue = [block for block in self.queue if block not in blocks]

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.queue.append(block)

    def name(self, pairs: list[tuple[bytes, int]]) -> None:
        for key, block in pairs:
            self.names.setdefault(key, block)


def assert_equal(pool: Pool, naive: Naive) -> None:
    assert pool.ref.tolist() == naive.holders
    assert free_blocks(pool).tolist() == naive.queue
    assert pool.free == len(naive.queue)
    assert dict(pool.prefix_index.blocks()) == naive.names and len(pool.prefix_index) == len(naive.names)
    assert {key: block for block, key in enumerate(pool.prefix_index.keys()) if key} == naive.names
    assert pool.status.hash == VersionedArray(pool.status.values().copy()).hash


def key_of(number: int) -> bytes:
    return bytes([number] * 16)


STEPS = st.lists(st.tuples(st.sampled_from(["take", "hold", "release", "name", "forget"]), st.randoms()), max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_pool_is_its_naive_model(steps: list) -> None:
    """Tables play the requests: each is what one of them holds. The pool's queue is compacted many times on the way."""
    pool, naive, tables, fresh_key = new_pool(BLOCK_COUNT), Naive(), [], 0
    for verb, rng in steps:
        if verb == "take":
            count = rng.randint(0, pool.free)
            pool, blocks = pools.take(pool, count)
            assert blocks.tolist() == naive.take(count)
            tables += [blocks.tolist()] if count else []
        elif verb == "hold" and naive.names:
            blocks = sorted(set(rng.choices(list(naive.names.values()), k=2)))
            pool = pools.hold(pool, np.array(blocks, dtype=np.int32))
            naive.hold(blocks)
            tables.append(blocks)
        elif verb == "release" and tables:
            blocks = tables.pop(rng.randrange(len(tables)))[::-1]
            pool = pools.release(pool, np.array(blocks, dtype=np.int32))
            naive.release(blocks)
        elif verb == "name" and tables:
            unnamed = [block for block in rng.choice(tables) if block not in naive.names.values()]
            pairs = []
            for block in unnamed:
                fresh_key += rng.random() < 0.8  # sometimes a key that is known already
                pairs.append((key_of(fresh_key), block))
            pool = pools.insert_hashes(pool, pairs)
            naive.name(pairs)
        elif verb == "forget" and rng.random() < 0.2:
            pool, naive.names = pools.clear_prefix_index(pool), {}
        assert_equal(pool, naive)


def test_the_queue_is_compacted_and_keeps_its_order() -> None:
    pool = new_pool(4)
    for turn in range(200):
        pool, blocks = pools.take(pool, 1 + turn % 4)
        pool = pools.release(pool, blocks[::-1])
        assert sorted(free_blocks(pool).tolist()) == [0, 1, 2, 3]
        assert pool.queue.used <= pool.queue.capacity


def test_an_old_pool_stays_valid() -> None:
    old = new_pool(4)
    for _ in range(30):
        new, blocks = pools.take(old, 3)
        pools.release(new, blocks)
        assert free_blocks(old).tolist() == [0, 1, 2, 3]
        assert free_blocks(new).tolist() == [3]


def test_a_taken_block_loses_its_name_and_a_revived_one_keeps_it() -> None:
    pool, blocks = pools.take(new_pool(3), 2)
    pool = pools.insert_hashes(pool, [(key_of(1), 0), (key_of(2), 1)])
    pool = pools.release(pool, blocks[::-1])
    assert free_blocks(pool).tolist() == [2, 1, 0]
    revived = pools.hold(pool, np.array([1], dtype=np.int32))
    assert free_blocks(revived).tolist() == [2, 0]
    evicted, taken = pools.take(revived, 2)
    assert taken.tolist() == [2, 0]
    assert dict(evicted.prefix_index.blocks()) == {key_of(2): 1}


def test_the_first_block_of_a_content_keeps_the_name() -> None:
    pool, _ = pools.take(new_pool(3), 3)
    pool = pools.insert_hashes(pool, [(key_of(1), 2), (key_of(1), 0)])
    pool = pools.insert_hashes(pool, [(key_of(1), 1)])
    assert dict(pool.prefix_index.blocks()) == {key_of(1): 2} and pool.prefix_index.keys() == [None, None, key_of(1)]


def test_the_longest_prefix_ends_at_the_first_gap_and_at_its_bound() -> None:
    pool, _ = pools.take(new_pool(4), 4)
    pool = pools.insert_hashes(pool, [(key_of(1), 0), (key_of(2), 1), (key_of(4), 3)])
    keys = tuple(key_of(number) for number in (1, 2, 3, 4))
    assert pools.longest_prefix(pool, keys, 4).tolist() == [0, 1]
    assert pools.longest_prefix(pool, keys, 1).tolist() == [0]
    assert pools.longest_prefix(pool, keys[1:], 4).tolist() == [1]
    assert pools.longest_prefix(pool, keys, 0).tolist() == []


@pytest.mark.parametrize("impl", [columns.impl, columns_numpy], ids=["chosen", "plain"])
def test_a_queue_that_holds_fewer_blocks_than_counted_is_an_error(impl) -> None:
    queue, status = np.arange(4, dtype=np.int32), np.array([0, -1, 2, 3])
    with pytest.raises(ValueError, match="1 blocks fewer than counted"):
        impl.oldest(queue, status, 0, 4, np.empty(4, dtype=np.int32))


def test_no_blocks_change_nothing() -> None:
    pool, none = new_pool(BLOCK_COUNT), np.empty(0, dtype=np.int32)
    assert pools.hold(pool, none) is pool and pools.release(pool, none) is pool
