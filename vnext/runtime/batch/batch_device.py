"""The persistent batch's rows on a device: block tables live there, and a step's index tensors are made there.

Owns the tables' memory and the transfers: a step sends the added blocks and four short arrays, instead of whole tables,
positions and slots. Decides nothing. `batch.py` computes the same on the host; tests compare both with `rebuild.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.batch_index import BatchOperations


class StepIndex(NamedTuple):
    """As in ForwardBatch: positions and slots int64 [T], query_starts int32 [R + 1], context_lengths int32 [R],
    block_table int32 [R, W]."""

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    block_table: torch.Tensor


class DeviceRows:
    """Block tables of `row_count` rows of at most `width` blocks. One thread uses it."""

    def __init__(
        self, row_count: int, width: int, block_size: int, device: torch.device, operations: BatchOperations
    ) -> None:
        self._table = torch.zeros((row_count, width), dtype=torch.int32, device=device)
        self._block_size = block_size
        self._device = device
        self._operations = operations

    def append(self, places: np.ndarray, held: np.ndarray, counts: np.ndarray, blocks: np.ndarray) -> None:
        """Append `counts` blocks to rows `places`, which hold `held` (int64[N] each): `blocks` int32[sum(counts)]."""
        grown = np.flatnonzero(counts)
        starts = np.zeros(len(grown) + 1, dtype=np.int64)
        np.cumsum(counts[grown], out=starts[1:])
        self._operations.write_spans(self._table, *map(self._send, (places[grown], held[grown], starts, blocks)))

    def index(self, begins: np.ndarray, query_starts: np.ndarray, places: np.ndarray, width: int) -> StepIndex:
        """The index tensors of a step whose entry n computes tokens from position begins[n] on (int64[R]) in row
        places[n] (int64[R]); query_starts int32[R + 1]; tables are cut to `width` blocks."""
        sent, starts, rows = map(self._send, (begins, query_starts, places))
        total = int(query_starts[-1])
        positions = torch.empty(total, dtype=torch.int64, device=self._device)
        slots = torch.empty_like(positions)
        contexts = torch.empty(len(begins), dtype=torch.int32, device=self._device)
        self._operations.index_tokens(sent, starts, rows, self._table, self._block_size, positions, slots, contexts)
        return StepIndex(positions, slots, starts, contexts, self._table[rows, :width])

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self._device)  # a copy: arrays of a state are read-only
