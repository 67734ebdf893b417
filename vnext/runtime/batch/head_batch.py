"""Drafts of a head that reads the target's hidden states (EAGLE-3, MTP): as a draft model's, one token after another.

A head computes a token from its embedding and from the state of the token before. What it keeps of a token lies at the token's own
place in the target's pages, so it follows from the tokens up to this one, like all else in a page: rows that share pages share it.
The first token of a text has no state before it: the head neither computes it nor looks at its place, and its tables, which have
pages of one token, begin with the second. What it keeps of drafts it forgets, for their states were its own guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.runtime.batch.draft_batch import HostDrafts, Run
from vnext.runtime.batch.sampling_rows import SamplingColumns
from vnext.sampling.inputs import SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.store import extents

SECOND = 1
"""The first token of a text that a head computes."""


class HeadModel(Protocol):
    """A head with a cache (runtime/rank/draft_head.py)."""

    def run(self, rows: ForwardBatch, before: np.ndarray, sampling: SamplingInputs | None) -> np.ndarray: ...


class HeadDrafts(HostDrafts):
    """Drafts of a head for the rows of one batch, by the contract of DraftBatch."""

    FIRST, HOLDS_DRAFTS = SECOND, False

    def __init__(self, head: HeadModel, table: np.ndarray, sampling: SamplingColumns, config: SchedulerConfig) -> None:
        super().__init__(table, sampling, config)
        self._head = head

    def _run(self, runs: Sequence[Run], sampling: SamplingInputs | None) -> np.ndarray:
        size = self._config.block_size
        places, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("place", "end"))
        counts = np.array([len(run.tokens) for run in runs], dtype=np.int64)
        positions, rows = extents.spans(ends - counts, counts), np.arange(len(runs)).repeat(counts)
        pages = self._table[places, : int(ends.max() - 1) // size + 1]
        slots = (pages[:, :, None] * np.int64(size) + np.arange(size)).reshape(len(runs), -1)
        sampled = np.cumsum(counts) - 1 if sampling is not None else np.empty(0, dtype=np.int64)
        host = HostBatch(np.arange(len(runs) + 1, dtype=np.int32), (ends - 1).astype(np.int32))
        table = np.ascontiguousarray(slots[:, 1:], dtype=np.int32)
        token_ids = np.maximum(np.concatenate([run.tokens for run in runs]).astype(np.int64), 0)  # no image is seen here
        arrays = (token_ids, positions - 1, slots[rows, positions], *host, table, sampled)
        batch = ForwardBatch(*arrays, host=host)
        return self._head.run(batch, slots[rows, positions - 1], sampling)
