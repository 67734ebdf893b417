"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

A plan is recorded and sent as its difference from this one, so a steady step costs a few bytes whatever the batch.
"""

from __future__ import annotations

import numpy as np

from vnext.state import columns
from vnext.state.config import SchedulerConfig
from vnext.state.rows import Rows


def expected_tokens(config: SchedulerConfig, rows: Rows) -> np.ndarray:
    """New tokens of each row (int64[R], 0 where nothing is to do or the budget has run out)."""
    tokens = np.empty(len(rows), dtype=np.int64)
    columns.kernels.expected(rows.cells, tokens, config.batch_tokens_max, config.prefill_threshold)
    return tokens


def blocks_needed(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Blocks each row lacks to compute so many tokens more (int64[R]), and their sum."""
    need = np.empty(len(rows), dtype=np.int64)
    return need, columns.kernels.needed(rows.cells, tokens, need, config.block_size)
