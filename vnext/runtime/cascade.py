"""Cascade: whether reading a prefix that all rows share once pays, and how long it is.

Pure. Rows that begin with the same blocks (a system prompt in the prefix cache) read the same keys; attention can read them
once for all (`shared_blocks`), with the same bits. It has no fixed shape, so a step of decodes then leaves its graph. The
figures below are estimates, not measurements: they decide when a step is fast, never what it gives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.state import extents
from vnext.state.state import State

READ_BYTES_PER_S = 4.0e12
"""A large GPU's memory; a smaller one saves more than is thought here."""
LEAVING_S_PER_LAYER = 60e-6
"""What a layer's launches cost more one by one than in a graph."""
TOKENS_MIN = 256
"""Attention shares whole splits of so many keys."""


class Costs(NamedTuple):
    """What a model's cascade is weighed by: bytes of keys and values of a token in all layers of a rank, and layers."""

    token_bytes: int
    layer_count: int


def pays(shared_tokens: int, row_count: int, is_decode: bool, costs: Costs) -> bool:
    """Whether reading `shared_tokens` once for all rows saves more time than it costs."""
    shared = shared_tokens // TOKENS_MIN * TOKENS_MIN
    saved_s = shared * (row_count - 1) * costs.token_bytes / READ_BYTES_PER_S
    return saved_s > (LEAVING_S_PER_LAYER * costs.layer_count if is_decode else 0.0)


def common_blocks(state: State, rows: np.ndarray | slice, begins: np.ndarray) -> int:
    """With how many blocks all of these rows of the state begin alike, of those that all their queries see whole.

    `begins` int64 [R]: the first position each computes. Models with windows have 0. Looks at every block of every row if the
    first ones are alike, so ask once for a batch and not at each step.
    """
    if state.config.windows or len(begins) < 2:
        return 0
    table_at, high = state.rows.table_at[rows], int(begins.min()) // state.config.block_size
    if high == 0 or len(np.unique(extents.gather(state.tables, table_at))) > 1:
        return 0
    tables = extents.gather(state.tables, table_at[:, None] + np.arange(high))
    differ = np.flatnonzero((tables != tables[0]).any(axis=0))
    return int(differ[0]) if len(differ) else high
