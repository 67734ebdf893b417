"""Admission: a waiting request becomes a row, with the blocks of its prefix that the cache already holds.

`allocate` changes the pool only, and the scheduler calls it before it decides, so a trial and the admission itself are
one function. Histories and tables are written only when the event is folded, never in a trial.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import pool as pools
from vnext.state.config import SchedulerConfig
from vnext.state.pool import Pool
from vnext.state.recurrent import NO_PAGES, held_for, source_of, with_snapshot
from vnext.state.state import Request, Waiting, blocks_for
from vnext.state.store import columns, fields
from vnext.state.store.columns_numpy import group_hash
from vnext.state.windows import NULL, longest_hit

TOKENS_SPARE = 256  # places beyond the known tokens that a new history gets before it moves to a larger extent


class Allocation(msgspec.Struct, frozen=True):
    """The pages of an admission: `table` (int32[n]) has the shared ones of the hits, then new ones.

    An entry of a hit is NULL where a window does not need the page. The first `hit_tokens` tokens need no computation. With
    recurrent layers, `states` are the request's state pages and `source` the snapshot that it starts from, -1 for none.
    """

    pool: Pool
    table: np.ndarray
    hit_tokens: int
    hashed_blocks: int
    states: np.ndarray
    source: int


def prefix_hits(config: SchedulerConfig, pool: Pool, waiting: Waiting) -> np.ndarray:
    """The table of the request's leading tokens that the cache holds. At least one token remains to be computed, and every
    token behind what the request may take from the cache.
    """
    most = waiting.hit_blocks_max(config.block_size)
    if config.windows:
        return longest_hit(config, pool, waiting.block_hashes[:most])
    hits = pools.longest_prefix(pool, waiting.block_hashes, most)
    return hits if pool.states is None else with_snapshot(pool, waiting.block_hashes, hits)


def hit_tokens_of(config: SchedulerConfig, hits: np.ndarray) -> int:
    return len(hits) // config.group_count * config.block_size


def fits(config: SchedulerConfig, pool: Pool, hits: np.ndarray, tokens: int) -> bool:
    """Whether the pool has enough free pages to compute `tokens` after these hits."""
    need = new_page_count(config, hits, tokens)
    revived = int((pool.status.at(shared(config, hits)) >= 0).sum()) if len(hits) else 0
    return need + revived <= pool.free


def new_page_count(config: SchedulerConfig, hits: np.ndarray, tokens: int) -> int:
    """The number of new pages that `tokens` after these hits need."""
    return blocks_for(hit_tokens_of(config, hits) + tokens, config.block_size) * config.group_count - len(hits)


def shared(config: SchedulerConfig, hits: np.ndarray) -> np.ndarray:
    """The hits without NULL entries."""
    return hits[hits != NULL] if config.windows else hits


def allocate(config: SchedulerConfig, pool: Pool, waiting: Waiting, hits: np.ndarray, tokens: int) -> Allocation:
    """Hold the hits, take new pages, and enter the blocks that this step completes into the prefix index."""
    hit_tokens, groups = hit_tokens_of(config, hits), config.group_count
    pool = pools.hold(pool, shared(config, hits))
    pool, new_pages = pools.take(pool, new_page_count(config, hits, tokens))
    hashed_blocks = (hit_tokens + tokens) // config.block_size
    if waiting.block_hashes:
        keys = waiting.block_hashes[len(hits) // groups : hashed_blocks]
        if groups > 1:
            keys = tuple([group_hash(key, group) for key in keys for group in range(groups)])
        pool = pools.insert_hashes(pool, list(zip(keys, new_pages.tolist())))
    source, held = -1, NO_PAGES
    if (states := pool.states) is not None:
        source = source_of(states, waiting, len(hits) // groups)
        states, held = held_for(config, states, source)
        pool = msgspec.structs.replace(pool, states=states)
    return Allocation(pool, np.concatenate((hits, new_pages)), hit_tokens, hashed_blocks, held, source)


def new_row(
    config: SchedulerConfig,
    request: Request,
    waiting: Waiting,
    allocation: Allocation,
    tokens: int,
    history: tuple[int, int],
    table: tuple[int, int],
    root: bytes,
) -> np.ndarray:
    """The admitted request's column of the matrix (int64[FIELD_COUNT]). `history` and `table`: place and size of its extents;
    `root` is the parent of its first block."""
    sampling, computed, known, prompt = request.sampling, allocation.hit_tokens + tokens, waiting.known, request.prompt_length
    row = [0] * fields.FIELD_COUNT
    row[fields.ID], row[fields.KNOWN], row[fields.COMPUTED] = request.id, known, computed
    row[fields.PLACEHOLDERS] = computed == known
    row[fields.LIMIT] = prompt + sampling.max_tokens
    row[fields.BLOCKS] = len(allocation.table) // config.group_count
    row[fields.HASHED_BLOCKS], row[fields.PROMPT] = allocation.hashed_blocks, prompt
    row[fields.PREEMPTION_COUNT], row[fields.PRIORITY] = waiting.preemption_count, request.priority
    row[fields.FLAGS] = fields.IGNORE_EOS * sampling.ignore_eos + fields.OWN_STOPS * bool(sampling.stop_token_ids)
    row[fields.FLAGS] += (sampling.num_speculative_tokens + 1) << fields.DRAFTS_SHIFT
    row[fields.MIN_KNOWN] = prompt + sampling.min_tokens
    row[fields.TABLE_HASH] = table_hash(allocation.table)
    row[fields.CACHED] = allocation.hit_tokens if waiting.cached < 0 else waiting.cached
    row[fields.TOKENS_AT], row[fields.TOKENS_SIZE] = history
    row[fields.TABLE_AT], row[fields.TABLE_SIZE] = table
    parent = (
        waiting.block_hashes[allocation.hashed_blocks - 1]
        if waiting.block_hashes and allocation.hashed_blocks
        else root
    )
    row[fields.BLOCK_HASH_0 :] = np.frombuffer(parent, dtype=np.int64).tolist()
    return np.array(row, dtype=np.int64)


def table_hash(blocks: np.ndarray) -> int:
    """The hash of a block table, as an int64 cell of the row stores its 64 bits."""
    word = columns.impl.array_hash(blocks.astype(np.int64))
    return word - 2**64 if word >= 2**63 else word


def tokens_size(request: Request, waiting: Waiting) -> int:
    """The size of the history's extent. It is not always the maximum, because the default `max_tokens` is large and most
    answers are short.
    """
    return min(request.prompt_length + request.sampling.max_tokens, waiting.known + TOKENS_SPARE)


def table_size(config: SchedulerConfig, request: Request) -> int:
    return blocks_for(request.prompt_length + request.sampling.max_tokens, config.block_size) * config.group_count
