"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

A plan is recorded and sent as its difference from this one, so a steady step costs a few bytes whatever the batch.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import columns
from vnext.state.config import SchedulerConfig
from vnext.state.rows import Rows


class Work(msgspec.Struct, frozen=True):
    """New tokens of each row and blocks it lacks for them (int64[R] each, never written again); the sum of the tokens and
    the pages that all these blocks are."""

    tokens: np.ndarray
    blocks: np.ndarray
    tokens_sum: int
    pages_sum: int


def expected_work(config: SchedulerConfig, rows: Rows) -> Work:
    """What each row does next: 0 tokens where nothing is to do or the budget has run out."""
    both = np.empty((2, len(rows)), dtype=np.int64)
    tokens_sum, blocks_sum = columns.kernels.expected(
        rows.cells, both, config.batch_tokens_max, config.prefill_threshold, config.block_size
    )
    if config.windows:
        blocks_sum *= len(config.windows)
    return Work(both[0], both[1], tokens_sum, blocks_sum)


def work_of(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> Work:
    """The work of computing so many tokens of each row (int64[R])."""
    need = np.empty(len(rows), dtype=np.int64)
    blocks = columns.kernels.needed(rows.cells, tokens, need, config.block_size)
    return Work(tokens, need, int(tokens.sum()), blocks * config.group_count)
