"""Attention to both sides: a token of a text sees those before and behind it, all, as many as a layer's reach, or of its image.

All of a step's keys are written before any is read, so a causal kernel does it with a row for each token, which ends where the
token sees no further. A row sees all before it or a window; behind a text's last tokens there is less, and their windows are
shorter. No text's bits depend on others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.models.layers.batch import ForwardBatch, HostBatch, host_batch

if TYPE_CHECKING:
    import torch

    from vnext.kernels.table import Operations


class _Rows(NamedTuple):
    """Tokens int64 [R] of a step whose rows have one window, and what attention knows of them."""

    tokens: torch.Tensor
    metadata: object
    window: int


class ByToken:
    """paged_attention of one step with a row for each token: it sees `seen` [T] tokens of its text, or the last of these where
    `windows` [T] is not 0."""

    def __init__(
        self, chosen: Operations, batch: ForwardBatch, sizes: tuple[int, int], seen: np.ndarray, windows: np.ndarray
    ) -> None:
        """`sizes`: a block's tokens, and key-value heads."""
        self._attend = chosen.paged_attention
        rows = {int(each): np.flatnonzero(windows == each) for each in np.unique(windows)}
        self._rows = [self._of(chosen, batch, sizes, tokens, seen, window) for window, tokens in rows.items()]

    @staticmethod
    def _of(
        chosen: Operations, batch: ForwardBatch, sizes: tuple[int, int], tokens: np.ndarray, seen: np.ndarray, window: int
    ) -> _Rows:
        rows = by_token(batch, tokens, seen)
        made = chosen.attention_metadata(AttentionStep(*host_batch(rows), rows.block_table, *sizes, (window,)))
        return _Rows(batch.block_table.new_tensor(tokens).long(), made, window)

    def __call__(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """As paged_attention, of query [T, heads, head_dim]."""
        found = query.new_empty(query.shape)
        for tokens, metadata, window in self._rows:
            own = call._replace(metadata=metadata, window=window)
            found.index_copy_(0, tokens, self._attend(query.index_select(0, tokens), own))
        return found


def by_token(batch: ForwardBatch, tokens: np.ndarray | None = None, seen: np.ndarray | None = None) -> ForwardBatch:
    """The batch with a row for each of these tokens, or for all, which sees `seen` [T] tokens of its text, or all."""
    starts, lengths = host_batch(batch)
    counts = np.diff(starts)
    texts, seen = np.repeat(np.arange(len(counts)), counts), np.repeat(lengths, counts) if seen is None else seen
    if tokens is not None:
        texts, seen = texts[tokens], seen[tokens]
    host = HostBatch(np.arange(len(texts) + 1, dtype=np.int32), seen.astype(np.int32))
    rows = batch.block_table.new_tensor(texts).long()
    return batch._replace(host=host, block_table=batch.block_table.index_select(0, rows))


def near(chosen: Operations, batch: ForwardBatch, sizes: tuple[int, int], reach: int) -> ByToken:
    """A token of whole texts sees `reach` tokens on either side."""
    starts, lengths = host_batch(batch)
    counts = np.diff(starts)
    places, ends = np.arange(starts[-1]) - np.repeat(starts[:-1], counts), np.repeat(lengths, counts)
    seen = np.minimum(ends, places + reach + 1)
    first = np.maximum(places - reach, 0)
    return ByToken(chosen, batch, sizes, seen, np.where((first > 0) & (seen < places + reach + 1), seen - first, 2 * reach + 1))


def mutual(chosen: Operations, batch: ForwardBatch, sizes: tuple[int, int], window: int) -> ByToken:
    """A token sees those before it, `window` with itself if that is not 0, and one of an input all behind it in the input, too."""
    starts, lengths = host_batch(batch)
    counts = np.diff(starts)
    places = np.arange(starts[-1]) + np.repeat(lengths - counts - starts[:-1], counts)
    seen = places + 1
    for at, count, _, _ in batch.inputs:
        seen[at : at + count] = seen[at + count - 1]
    wider = np.where(places < window, 0, window + seen - 1 - places)
    return ByToken(chosen, batch, sizes, seen, np.where((seen == places + 1) | (window == 0), window, wider))
