"""Sampling: a token for each row of logits. What a token is, and why it is exact: `vnext/sampling/weights.py`.

Gives the tokens of the CPU's compiled form and of torch's, bit for bit of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vnext.kernels.cuda.backends import kernel_for

SOURCE = "sampling.cu"
MANY_THREADS, SAMPLE_THREADS, ADJUST_THREADS = 1024, 512, 256
SLICE = 4096
"""Tokens of a block of `adjust_rows` and `mask_rows`, as the source has it."""
FEW_ROWS = 128
"""Up to so many rows a GPU has a multiprocessor for each, which then has the more threads."""
SHARED_BYTES = (1024 + 32) * 8 + 16 + 32 * (16 + 8) + 8 + 4096 * 8
"""Bins, the state of a search, for each warp its sums and its likeliest token, a count, tokens with weights."""
ALIGNED_BYTES, ALIGNED_COUNT = 16, 4
NULL = np.int64(0)
"""A pointer to nothing."""


def sample_rows(
    logits: torch.Tensor, columns: Sequence[torch.Tensor], threads: int = 0, spoilt: torch.Tensor | None = None
) -> torch.Tensor:
    """As kernels/cpu/sampling.sample_rows: int64[S] tokens of `logits` float32[S, V], V at most 2**22. Into `spoilt` bool[S], where
    it is given, goes which rows hold a NaN.

    `columns`: dense, [S] each, in the order of the source's arguments. `threads`, a multiple of 32 and at most 1024 (0: by
    the number of rows), changes no token.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        kernel = kernel_for(logits.device, SOURCE, "sample_rows", ())
        aligned = logits.data_ptr() % ALIGNED_BYTES == 0 and logits.stride(0) % ALIGNED_COUNT == 0
        sizes = (np.int64(logits.stride(0)), np.int32(vocabulary), np.int32(aligned))
        arguments = (tokens, logits, *columns, *sizes, NULL if spoilt is None else spoilt)
        threads = threads or (MANY_THREADS if rows <= FEW_ROWS else SAMPLE_THREADS)
        kernel((rows,), (threads,), arguments, shared_mem=SHARED_BYTES)
    return tokens


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Minus infinity, in place, for the tokens that a mask does not have: of row rows[i] of logits float32[S, V] by masks[i].

    `rows` int64[C]; `masks` int32[C, V / 32, rounded up], dense, the lowest bit of the first word first.
    """
    count, words = masks.shape
    require_dense_rows(logits)
    if count:
        kernel = kernel_for(logits.device, SOURCE, "mask_rows", ())
        sizes = (np.int64(logits.stride(0)), np.int32(logits.shape[1]), np.int32(words))
        kernel((-(-logits.shape[1] // SLICE), count), (ADJUST_THREADS,), (logits, rows.contiguous(), masks.contiguous(), *sizes))


def require_dense_rows(logits: torch.Tensor) -> None:
    """Raises ValueError unless each row's elements lie side by side."""
    if logits.stride(1) != 1:
        raise ValueError("rows of logits must be dense to be changed in place; copy them first")


def adjust_rows(
    logits: torch.Tensor,
    places: torch.Tensor,
    positions: torch.Tensor,
    tables: Sequence[torch.Tensor],
    drafts: Sequence[torch.Tensor | None] = (None, None),
) -> None:
    """Bias, bans and penalties of logits float32[S, V], in place, whose rows are dense: as sampling/logits.adjust_rows.

    `places` and `positions` int64[S]; `tables` and `drafts` are those of sampling/inputs.RowTables, dense, and BehindDrafts.
    """
    rows, vocabulary = logits.shape
    require_dense_rows(logits)
    if not rows:
        return
    kernel = kernel_for(logits.device, SOURCE, "adjust_rows", ())
    _, _, history, bias_tokens, _, stop_tokens = tables
    sizes = map(np.int32, (vocabulary, history.shape[0], bias_tokens.shape[1], stop_tokens.shape[1]))
    given = [NULL if each is None else each.contiguous() for each in drafts]
    arguments = (logits, places.contiguous(), positions.contiguous(), *tables, *given, np.int64(logits.stride(0)), *sizes)
    kernel((-(-vocabulary // SLICE), rows), (ADJUST_THREADS,), arguments)
