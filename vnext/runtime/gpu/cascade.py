"""Cascade: whether it pays to read a prefix that all rows share only once, and how long that prefix is.

Pure. Rows that begin with the same blocks (a system prompt in the prefix cache) read the same keys; attention can read them
once for all (`shared_blocks`), with the same bits. This has no fixed shape, so a step of decodes then leaves its graph. The
figures below are estimates, not measurements: they affect how fast a step is, never its results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.state.state import State
from vnext.state.store import extents

READ_BYTES_PER_S = 4.0e12
"""A large GPU's memory bandwidth; with a slower one, sharing saves more than estimated here."""
LEAVING_S_PER_LAYER = 60e-6
"""How much more a layer's launches cost one by one than in a graph."""
TOKENS_MIN = 256
"""Attention shares whole splits of this many keys."""


class Costs(NamedTuple):
    """The costs of a model's cascade: bytes of one token's keys and values in all layers of a rank, and the layer count."""

    token_bytes: int
    layer_count: int


def pays(shared_tokens: int, row_count: int, is_decode: bool, costs: Costs) -> bool:
    """Whether reading `shared_tokens` once for all rows saves more time than it costs."""
    shared = shared_tokens // TOKENS_MIN * TOKENS_MIN
    saved_s = shared * (row_count - 1) * costs.token_bytes / READ_BYTES_PER_S
    return saved_s > (LEAVING_S_PER_LAYER * costs.layer_count if is_decode else 0.0)


def common_blocks(state: State, rows: np.ndarray | slice, begins: np.ndarray) -> int:
    """The number of leading blocks that these rows of the state share, among the blocks that all their queries see whole.

    `begins` int64 [R]: the first position each row computes. 0 for models with windows. If the first blocks are equal, this
    reads every block of every row, so ask once per batch and not at each step.
    """
    if state.config.windows or len(begins) < 2:
        return 0
    table_at, high = state.rows.table_at[rows], int(begins.min()) // state.config.block_size
    if high == 0 or len(np.unique(extents.gather(state.tables, table_at))) > 1:
        return 0
    tables = extents.gather(state.tables, table_at[:, None] + np.arange(high))
    differ = np.flatnonzero((tables != tables[0]).any(axis=0))
    return int(differ[0]) if len(differ) else high
