"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

Plans are recorded and sent as differences from this one, so a steady step costs a few bytes whatever the batch size.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.drafting import expected_drafts
from vnext.state.store import columns
from vnext.state.store.rows import Rows


class Work(msgspec.Struct, frozen=True):
    """The work of one step: new tokens of each row and the blocks it lacks for them (int64[R] each, never written again).

    `tokens_sum` is the sum of the tokens, `pages_sum` the number of pages that all these blocks take. `drafts` int64[R]: how
    many of the tokens are drafts; None without speculation.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    tokens_sum: int
    pages_sum: int
    drafts: np.ndarray | None = None


def expected_work(config: SchedulerConfig, rows: Rows, free_pages: int | None = None) -> Work:
    """The work of the expected plan: 0 tokens for a row that has nothing to compute or that the budget does not reach.

    Drafts are part of it while `free_pages` suffice for all of them; None means no drafts.
    """
    work = _without_drafts(config, rows)
    if config.speculation is None:
        return work
    if free_pages is not None and len(rows):
        drafts, total = expected_drafts(config, rows, work.tokens)
        if not total:
            return msgspec.structs.replace(work, drafts=drafts)
        drafting = work_of(config, rows, work.tokens + drafts, drafts)
        if drafting.pages_sum <= free_pages:
            return drafting
    return msgspec.structs.replace(work, drafts=np.zeros_like(work.tokens))


def _without_drafts(config: SchedulerConfig, rows: Rows) -> Work:
    both = np.empty((2, len(rows)), dtype=np.int64)
    tokens_sum, blocks_sum = columns.impl.expected(
        rows.cells, both, config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size
    )
    if config.windows:
        blocks_sum *= len(config.windows)
    return Work(both[0], both[1], tokens_sum, blocks_sum)


def work_of(config: SchedulerConfig, rows: Rows, tokens: np.ndarray, drafts: np.ndarray | None = None) -> Work:
    """The work of computing the given number of tokens in each row, of which `drafts` are drafts (int64[R] each)."""
    need = np.empty(len(rows), dtype=np.int64)
    blocks = columns.impl.needed(rows.cells, tokens, need, config.block_size)
    return Work(tokens, need, int(tokens.sum()), blocks * config.group_count, drafts)
