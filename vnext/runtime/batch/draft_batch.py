"""Drafts of a model: the draft model's steps over the rows that may take drafts, one token of each row after another.

The draft model has a cache of its own under the target's page numbers, so a row has the same block table in both. Each draft is
drawn with the request's parameters by the seed and position of the token that it guesses. Where both models expect the same of a
token, they draw the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.runtime.batch.sampling_rows import SamplingColumns
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs


class DraftModel(Protocol):
    """A model with a cache (runtime/rank/runner.py)."""

    def run(self, inputs: StepInputs) -> StepOutputs: ...


class DraftedRow(NamedTuple):
    """A row that may take drafts: its batch row, the position and the number of its last token, and the most drafts."""

    place: int
    position: int
    token: int
    most: int


class DraftBatch:
    """Drafts for the rows of one batch. `table` int32[rows, W] is the batch's own, of one group of layers."""

    def __init__(self, model: DraftModel, table: np.ndarray, sampling: SamplingColumns, block_size: int) -> None:
        self._model, self._table, self._sampling, self._block_size = model, table, sampling, block_size

    def drafts(self, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        """The drafts of each row (int32[most] each)."""
        found = [np.empty(0, dtype=np.int32) for _ in rows]
        for draft in range(max(row.most for row in rows)):
            going = [at for at, row in enumerate(rows) if row.most > draft]
            places = np.array([rows[at].place for at in going], dtype=np.int64)
            tokens = np.array([found[at][-1] if draft else rows[at].token for at in going], dtype=np.int64)
            positions = np.array([rows[at].position + draft for at in going], dtype=np.int64)
            forward = self._forward(places, positions, tokens)
            sampling, _ = self._sampling.inputs(places, positions + 1, [found[at] for at in going] if draft else None)
            assert sampling is not None
            no_logprobs = np.full(len(going), -1, dtype=np.int64)
            outputs = self._model.run(StepInputs(forward, sampling._replace(logprobs=-1), no_logprobs))
            for at, token in zip(going, outputs.tokens.tolist()):
                found[at] = np.append(found[at], np.int32(token))
        return found

    def follow(self, forward: ForwardBatch) -> None:
        """Compute what the target computes, so that each page holds the same tokens in both caches."""
        self._model.run(StepInputs(forward._replace(adapters=()), None, np.empty(0, dtype=np.int64)))

    def _forward(self, places: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> ForwardBatch:
        """The batch of one token for each row (int64[R] each)."""
        block, offset = np.divmod(positions, self._block_size)
        slots = self._table[places, block] * np.int64(self._block_size) + offset
        table = self._table[places, : int(block.max()) + 1]
        host = HostBatch(np.arange(len(places) + 1, dtype=np.int32), (positions + 1).astype(np.int32))
        arrays = (tokens, positions, slots, *host, table, np.arange(len(places)))
        return ForwardBatch(*map(torch.from_numpy, arrays), host=host)
