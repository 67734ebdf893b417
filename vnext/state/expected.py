"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

A plan is recorded and sent as its difference from this one, so a steady step costs a few bytes whatever the batch.
"""

from __future__ import annotations

import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.rows import Rows, wants


def expected_tokens(config: SchedulerConfig, rows: Rows) -> np.ndarray:
    """New tokens of each row (int64[R], 0 where nothing is to do or the budget has run out)."""
    tokens = wants(rows)
    if config.prefill_threshold:
        tokens = np.minimum(tokens, config.prefill_threshold)
    ends = np.cumsum(tokens)
    if len(ends) and ends[-1] > config.batch_tokens_max:
        tokens = np.clip(config.batch_tokens_max - (ends - tokens), 0, tokens)
    return tokens


def blocks_needed(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> np.ndarray:
    """Blocks each row lacks to compute so many tokens more (int64[R])."""
    return -(-(rows.computed + tokens) // config.block_size) - rows.blocks
