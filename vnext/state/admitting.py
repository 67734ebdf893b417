"""Admission: a waiting request becomes a row, with the blocks its prefix already has in the cache.

`claim` touches the pool only and is also what the scheduler tries before it decides: a trial and the real thing are
one function. Histories and tables are written when the event is folded, never in a trial.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import columns as column_forms, extents, pool as pools, rows as columns
from vnext.state.columns_numpy import group_key
from vnext.state.config import SchedulerConfig
from vnext.state.extents import Extents
from vnext.state.pool import Pool
from vnext.state.state import Request, Waiting, blocks_for
from vnext.state.windows import NULL, longest_hit

TOKENS_SPARE = 256  # places a history has beyond its known tokens before it moves to a larger extent


class Claim(msgspec.Struct, frozen=True):
    """Pages of an admission, as they stand in its table: `hits` are shared (NULL where a window needs none), `fresh` are
    new; `hit_tokens` need not be computed."""

    pool: Pool
    hits: np.ndarray
    fresh: np.ndarray
    hit_tokens: int
    sealed: int


def prefix_hits(config: SchedulerConfig, pool: Pool, waiting: Waiting) -> np.ndarray:
    """The table of what the cache has of the request's leading tokens; at least one token stays to be computed."""
    most = (waiting.known - 1) // config.block_size
    if config.windows:
        return longest_hit(config, pool, waiting.keys[:most])
    return pools.longest_prefix(pool, waiting.keys, most)


def hit_tokens_of(config: SchedulerConfig, hits: np.ndarray) -> int:
    """Tokens that these hits save."""
    return len(hits) // config.group_count * config.block_size


def fits(config: SchedulerConfig, pool: Pool, hits: np.ndarray, tokens: int) -> bool:
    """Whether the pool has the blocks to compute `tokens` after these hits."""
    need = fresh_pages(config, hits, tokens)
    revived = int((pool.status.at(shared(config, hits)) >= 0).sum()) if len(hits) else 0
    return need + revived <= pool.free


def fresh_pages(config: SchedulerConfig, hits: np.ndarray, tokens: int) -> int:
    """Pages that `tokens` after these hits take."""
    return blocks_for(hit_tokens_of(config, hits) + tokens, config.block_size) * config.group_count - len(hits)


def shared(config: SchedulerConfig, hits: np.ndarray) -> np.ndarray:
    """The hits that are pages."""
    return hits[hits != NULL] if config.windows else hits


def claim(config: SchedulerConfig, pool: Pool, waiting: Waiting, hits: np.ndarray, tokens: int) -> Claim:
    """Hold the hits, take what is missing and name what this step completes."""
    hit_tokens, groups = hit_tokens_of(config, hits), config.group_count
    pool = pools.hold(pool, shared(config, hits))
    pool, fresh = pools.take(pool, fresh_pages(config, hits, tokens))
    sealed = (hit_tokens + tokens) // config.block_size
    if waiting.keys:
        keys = waiting.keys[len(hits) // groups : sealed]
        if groups > 1:
            keys = [group_key(key, group) for key in keys for group in range(groups)]
        pool = pools.name(pool, list(zip(keys, fresh.tolist())))
    return Claim(pool, hits, fresh, hit_tokens, sealed)


def new_row(
    config: SchedulerConfig, request: Request, waiting: Waiting, claimed: Claim, tokens: int, tokens_at: int, table_at: int
) -> np.ndarray:
    """The admitted request's column of the matrix (int64[FIELD_COUNT])."""
    sampling, computed = request.sampling, claimed.hit_tokens + tokens
    row = np.zeros(columns.FIELD_COUNT, dtype=np.int64)
    row[columns.ID], row[columns.KNOWN], row[columns.COMPUTED] = request.id, waiting.known, computed
    row[columns.PENDING] = computed == waiting.known
    row[columns.LIMIT] = request.prompt_length + sampling.max_tokens
    row[columns.BLOCKS] = (len(claimed.hits) + len(claimed.fresh)) // config.group_count
    row[columns.SEALED], row[columns.PROMPT] = claimed.sealed, request.prompt_length
    row[columns.EPOCH], row[columns.PRIORITY] = waiting.epoch, request.priority
    row[columns.FLAGS] = columns.IGNORE_EOS * sampling.ignore_eos + columns.OWN_STOPS * bool(sampling.stop_token_ids)
    row[columns.MIN_KNOWN] = request.prompt_length + sampling.min_tokens
    row[columns.TABLE_SUM] = table_sum(np.concatenate((claimed.hits, claimed.fresh)))
    row[columns.CACHED] = claimed.hit_tokens if waiting.cached < 0 else waiting.cached
    row[columns.TOKENS_AT], row[columns.TOKENS_SIZE] = tokens_at, tokens_size(request, waiting)
    row[columns.TABLE_AT], row[columns.TABLE_SIZE] = table_at, table_size(config, request)
    parent = waiting.keys[claimed.sealed - 1] if waiting.keys and claimed.sealed else request.root
    row[columns.CHAIN_0 :] = np.frombuffer(parent, dtype=np.int64)
    return row


def table_sum(blocks: np.ndarray) -> int:
    """What stands for a block table in digests; the word's bits as a cell holds them."""
    word = column_forms.kernels.mixed(blocks.astype(np.int64))
    return word - 2**64 if word >= 2**63 else word


def tokens_size(request: Request, waiting: Waiting) -> int:
    """Places of the history's extent: a default `max_tokens` is long, and most answers are not."""
    return min(request.prompt_length + request.sampling.max_tokens, waiting.known + TOKENS_SPARE)


def table_size(config: SchedulerConfig, request: Request) -> int:
    return blocks_for(request.prompt_length + request.sampling.max_tokens, config.block_size) * config.group_count


def write_history(tokens: Extents, waiting: Waiting, at: int) -> Extents:
    return extents.write(tokens, slice(at, at + waiting.known), np.frombuffer(waiting.tokens, dtype="<i4"))


def write_table(tables: Extents, claimed: Claim, at: int) -> Extents:
    blocks = np.concatenate((claimed.hits, claimed.fresh))
    return extents.write(tables, slice(at, at + len(blocks)), blocks)
