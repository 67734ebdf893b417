"""Windows: groups of layers, and the blocks that a group with windowed attention still holds.

A block (`block_size` tokens of one request) takes one page of the pool in each group of layers. A row's table stores
them side by side: the page of group g of block j is at index j * groups + g. A group with window w holds the blocks
that a query from `computed` on may see, and no earlier ones:
    held by group g of a row  ==  [first_kept(computed, w), blocks)          w == 0: all, first_kept is 0
Planning a step gives back the pages that the step no longer needs, after all rows have taken the pages it writes.
Ranks run steps in order, so no later step writes a page before the last step that reads it has run. Tables stay
append-only: entries below first_kept are not read, and COMPUTED alone determines them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vnext.state import pool as pools
from vnext.state.config import SchedulerConfig
from vnext.state.pool import Pool
from vnext.state.recurrent import snapshot_blocks
from vnext.state.state import State, blocks_for
from vnext.state.store import extents
from vnext.state.store.columns_numpy import group_hash

NULL = -1
"""A table entry of a block that the request never held in this group, because its prefix hit did not need it."""


@cache
def window_array(windows: tuple[int, ...]) -> np.ndarray:
    """The groups' windows, [0] for one group with full attention (int64[G], read-only)."""
    values = np.array(windows or (0,), dtype=np.int64)
    values.flags.writeable = False
    return values


@cache
def window_bytes(windows: tuple[int, ...], given_back: bool) -> bytes:
    """The groups' windows as `columns.hash_full_blocks` takes them; all 0 while nothing has been given back yet."""
    return window_array(windows if given_back else (0,) * len(windows)).tobytes()


def first_kept(config: SchedulerConfig, computed: np.ndarray) -> np.ndarray:
    """The first block that each group still holds after `computed` tokens (int64[n] -> int64[n, G])."""
    windows = window_array(config.windows)
    return np.where(windows, np.maximum(computed[:, None] - windows + 1, 0), 0) // config.block_size


def held_entries(config: SchedulerConfig, computed: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Which entries of these rows' tables, one table after another, are held (bool[sum(blocks) * G])."""
    places = extents.spans(np.zeros_like(blocks), blocks)
    return (places[:, None] >= np.repeat(first_kept(config, computed), blocks, axis=0)).reshape(-1)


def row_table(state: State, row: int) -> np.ndarray:
    """The whole block table of one row, including pages given back (int32[blocks * G], read-only)."""
    count = int(state.rows.blocks[row]) * state.config.group_count
    return extents.read(state.tables, int(state.rows.table_at[row]), count)


def row_blocks(state: State, row: int) -> np.ndarray:
    """The pages that one row holds, in table order (int32[n], read-only)."""
    table, config = row_table(state, row), state.config
    if not config.windows:
        return table
    here = slice(row, row + 1)
    return table.compress(held_entries(config, state.rows.computed_at_least[here], state.rows.blocks[here]))


def give_back(state: State, starts: np.ndarray) -> Pool:
    """The pool without the pages that no query from the rows' computed tokens on can see.

    `starts` (int64[R]): tokens that were computed for certain before the step. The rows gave back their earlier pages when
    they reached them.
    """
    runs = _outdated(state, starts)
    if not runs:
        return state.pool
    pages = np.concatenate(runs)
    if len(runs) == 1 or len(np.unique(pages)) == len(pages):
        return pools.release(state.pool, pages)
    pool = state.pool
    for run in runs:  # rows with a common prefix give back the same page; each releases its own hold
        pool = pools.release(pool, run)
    return pool


def _outdated(state: State, starts: np.ndarray) -> list[np.ndarray]:
    """The pages that leave the windows between `starts` and the rows' computed tokens: one run for each row and group,
    last page first.
    """
    config, rows = state.config, state.rows
    before, after = first_kept(config, starts), first_kept(config, rows.computed_at_least)
    count, data = config.group_count, state.tables.arena.data
    found = []
    for row, group in zip(*(places.tolist() for places in np.nonzero(after > before))):
        at = int(rows.table_at[row]) + group
        found.append(data[at + int(before[row, group]) * count : at + int(after[row, group]) * count : count][::-1])
    return found


def longest_hit(config: SchedulerConfig, pool: Pool, keys: tuple[bytes, ...]) -> np.ndarray:
    """The table of the longest prefix of `keys` from which every group can continue (int32[blocks * G], NULL if not held).

    A group with full attention needs every block of it; a group with a window needs the last blocks, as in `first_kept`.
    """
    count, groups, size = len(keys), config.group_count, config.block_size
    found = pool.prefix_index.blocks_of(group_hash(key, group) for key in keys for group in range(groups))
    pages = np.array([NULL if page is None else page for page in found], dtype=np.int32).reshape(count, groups)
    lengths = np.arange(1, count + 1)
    there = lengths[:, None] - np.maximum.accumulate(np.where(pages == NULL, lengths[:, None], 0), axis=0)
    first = first_kept(config, lengths * size)
    whole = ((there >= lengths[:, None] - first).all(axis=1) & snapshot_blocks(pool, keys)).nonzero()[0]
    if len(whole) == 0:
        return np.empty(0, dtype=np.int32)
    last = int(whole[-1])
    table = pages[: last + 1]
    table[lengths[: last + 1, None] <= first[last]] = NULL
    return table.reshape(-1)


def pages_needed(config: SchedulerConfig, tokens: int) -> int:
    """The most pages that a request of `tokens` computed tokens may hold at once when it runs alone, for any split into steps.

    While a step runs, a group with a window holds what the step's first query sees and everything that the step computes.
    """
    size, whole = config.block_size, blocks_for(tokens, config.block_size)
    chunk = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens, tokens)
    seen = [blocks_for(window + chunk - 2, size) + 1 if window else whole for window in config.windows or (0,)]
    return sum(min(whole, most) for most in seen)
