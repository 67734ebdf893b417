"""Drafts of a model: the draft model's steps over the rows that may take drafts, one token of each row after another.

The draft model has a cache of its own under the target's page numbers, so a row has the same block table in both. A page may hold
fewer tokens there: the draft model computes a row's missing tokens when the row drafts, and nothing for rows that do not. Each
draft is drawn with the request's parameters by the seed and position of the token that it guesses. Where both models expect the
same of a token, they draw the same one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.runtime.batch.sampling_rows import SamplingColumns
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs
from vnext.sampling.inputs import SamplingInputs
from vnext.state.config import SchedulerConfig
from vnext.state.state import blocks_for
from vnext.state.store import extents

if TYPE_CHECKING:
    import torch


class DraftModel(Protocol):
    """A model with a cache (runtime/rank/runner.py)."""

    def run(self, inputs: StepInputs) -> StepOutputs: ...


class DraftedRow(NamedTuple):
    """A row that may take drafts: its batch row, all its tokens (int32[n]), the last of which the step computes, and the most
    drafts."""

    place: int
    tokens: np.ndarray
    most: int


class Run(NamedTuple):
    """Tokens that the draft model computes of a row: those of `tokens` (int32[n]), which end before position `end`."""

    place: int
    tokens: np.ndarray
    end: int


class DraftBatch(ABC):
    """Drafts for the rows of one batch. `table` int32[rows, W] is the batch's own, of one group of layers."""

    FIRST = 0
    """The first token of a text that the model computes."""
    made: torch.Tensor | None = None
    """The drafts on a device that keeps them (see runtime/gpu/head_drafts.py)."""

    def __init__(self, table: np.ndarray, config: SchedulerConfig) -> None:
        self._table, self._config = table, config
        self._held = np.zeros(config.page_count, dtype=np.int64)  # tokens of each page, from its first, that the draft model holds

    def forget(self, places: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """The target's step writes `counts` tokens from `starts` on (int64[R] each), one at least, of the rows at `places`."""
        size = self._config.block_size
        first, offset = np.divmod(starts, size)
        pages = self._table[places, first]
        self._held[pages] = np.minimum(self._held[pages], offset)
        more = (starts + counts - 1) // size - first
        if more.any():
            self._held[self._table[places.repeat(more), extents.spans(first + 1, more)]] = 0

    def drafts(self, rows: Sequence[DraftedRow]) -> list[np.ndarray]:
        """The drafts of each row (int32[most] each); none of a row that misses more tokens than a step may have."""
        found = [np.empty(0, dtype=np.int32) for _ in rows]
        runs, left = [], self._config.max_num_batched_tokens
        for row in rows:
            held = self._held_of(row.place, len(row.tokens))
            tokens = row.tokens[held : held + left]
            left -= len(tokens)
            runs.append(Run(row.place, tokens, held + len(tokens)))
        going = [at for at, (row, run) in enumerate(zip(rows, runs)) if len(run.tokens) and run.end == len(row.tokens)]
        self._compute([run for at, run in enumerate(runs) if at not in going and len(run.tokens)])
        for draft in range(max(row.most for row in rows)):
            going = [at for at in going if rows[at].most > draft]
            if not going:
                break
            if draft:
                runs = [self._next_run(row, drafts) for row, drafts in zip(rows, found)]
            drawn = self._draw([runs[at] for at in going], [found[at] for at in going] if draft else None)
            for at, token in zip(going, drawn.tolist()):
                found[at] = np.append(found[at], np.int32(token))
        return found

    def _next_run(self, row: DraftedRow, drafts: np.ndarray) -> Run:
        """What computes the newest of a row's drafts (int32[n])."""
        return Run(row.place, drafts[-1:], len(row.tokens) + len(drafts))

    def _held_of(self, place: int, length: int) -> int:
        """How many of a row's tokens the draft model holds; at most all but the last of `length`."""
        pages = self._held[self._table[place, : blocks_for(length, self._config.block_size)]]
        whole = int(np.argmax(pages < self._config.block_size))
        return max(self.FIRST, whole * self._config.block_size + int(pages[whole]))

    @abstractmethod
    def _draw(self, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        """Compute the runs and sample the token behind each (int64[R]); `drafts` are those of the rows so far."""

    @abstractmethod
    def _compute(self, runs: Sequence[Run]) -> None:
        """Compute the runs, if there are some."""

    def _note(self, runs: Sequence[Run]) -> None:
        """The draft model holds these runs."""
        size = self._config.block_size
        for place, tokens, end in runs:
            blocks = np.arange((end - len(tokens)) // size, blocks_for(end, size))
            self._held[self._table[place, blocks]] = np.minimum(end - blocks * size, size)


class HostDrafts(DraftBatch):
    """Drafts that a model on the host makes."""

    HOLDS_DRAFTS = True
    """Whether what the model has computed of a draft serves later, when the draft was right."""

    def __init__(self, table: np.ndarray, sampling: SamplingColumns, config: SchedulerConfig) -> None:
        super().__init__(table, config)
        self._sampling = sampling

    def _draw(self, runs: Sequence[Run], drafts: list[np.ndarray] | None) -> np.ndarray:
        places, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("place", "end"))
        sampling, _ = self._sampling.inputs(places, ends, drafts)
        assert sampling is not None
        tokens = self._run(runs, sampling._replace(logprobs=-1))
        if drafts is None or self.HOLDS_DRAFTS:
            self._note(runs)
        return tokens

    def _compute(self, runs: Sequence[Run]) -> None:
        if runs:
            self._run(runs, None)
            self._note(runs)

    @abstractmethod
    def _run(self, runs: Sequence[Run], sampling: SamplingInputs | None) -> np.ndarray:
        """Compute the runs and sample the token behind each (int64[R]), none without `sampling`."""


class HostModelDrafts(HostDrafts):
    """Drafts of a draft model."""

    def __init__(self, model: DraftModel, table: np.ndarray, sampling: SamplingColumns, config: SchedulerConfig) -> None:
        super().__init__(table, sampling, config)
        self._model = model

    def _run(self, runs: Sequence[Run], sampling: SamplingInputs | None) -> np.ndarray:
        logprobs = np.full(len(runs) if sampling else 0, -1, dtype=np.int64)
        tokens: np.ndarray = self._model.run(StepInputs(self._forward(runs), sampling, logprobs)).tokens
        return tokens

    def _forward(self, runs: Sequence[Run]) -> ForwardBatch:
        size = self._config.block_size
        places, ends = (np.array([getattr(run, name) for run in runs], dtype=np.int64) for name in ("place", "end"))
        counts = np.array([len(run.tokens) for run in runs], dtype=np.int64)
        positions = extents.spans(ends - counts, counts)
        block, offset = np.divmod(positions, size)
        slots = self._table[places.repeat(counts), block] * np.int64(size) + offset
        host = HostBatch(np.append(0, np.cumsum(counts)).astype(np.int32), ends.astype(np.int32))
        table = self._table[places, : int(block.max()) + 1]
        token_ids = np.maximum(np.concatenate([run.tokens for run in runs]).astype(np.int64), 0)  # no image is seen here
        arrays = (token_ids, positions, slots, *host, table, np.cumsum(counts) - 1)
        return ForwardBatch(*arrays, host=host)


# ---- drafts of a head --------------------------------------------------------------------------------------------
# A head reads the target's hidden states (EAGLE-3, MTP): it computes a token from its embedding and from the state of the token
# before. What it keeps of a token lies at the token's own place in the target's pages, so it follows from the tokens up to this
# one, like all else in a page: rows that share pages share it. The first token of a text has no state before it: the head neither
# computes it nor looks at its place, and its tables, which have pages of one token, begin with the second. What it keeps of
# drafts it forgets, for their states were its own guesses.

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
