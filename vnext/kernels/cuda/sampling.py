"""Sampling: a token for each row of logits. What a token is, and why it is exact: `vnext/runtime/sampling_weights.py`.

Gives the tokens of the CPU's compiled form and of torch's, bit for bit of their weights.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.kernels.cuda.backends import kernel_for

SOURCE = "sampling.cu"
MANY_THREADS, SAMPLE_THREADS, PENALTY_THREADS = 1024, 512, 256
FEW_ROWS = 128
"""Up to so many rows a GPU has a multiprocessor for each, which then has the more threads."""
SHARED_BYTES = (1024 + 32) * 8 + 16 + 32 * (16 + 8) + 8 + 4096 * 8
"""Bins, the state of a search, for each warp its sums and its likeliest token, a count, tokens with weights."""
ALIGNED_BYTES, ALIGNED_COUNT = 16, 4


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    threads: int = 0,
) -> torch.Tensor:
    """As kernels/cpu/sampling.sample_rows: int64[S] tokens of `logits` float32[S, V], V at most 2**22.

    `temperature` (0: greedy), `top_p` (1: off) and `min_p` (0: off) are float32[S]; `top_k` (0: off), `seed` and
    `position` int64[S]. `threads`, a multiple of 32 and at most 1024 (0: by the number
    of rows), changes no token.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        columns = [column.contiguous() for column in (temperature, top_k, top_p, min_p, seed, position)]
        kernel = kernel_for(logits.device, SOURCE, "sample_rows", ())
        aligned = logits.data_ptr() % ALIGNED_BYTES == 0 and logits.stride(0) % ALIGNED_COUNT == 0
        arguments = (tokens, logits, *columns, np.int64(logits.stride(0)), np.int32(vocabulary), np.int32(aligned))
        threads = threads or (MANY_THREADS if rows <= FEW_ROWS else SAMPLE_THREADS)
        kernel((rows,), (threads,), arguments, shared_mem=SHARED_BYTES)
    return tokens


def penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Penalties of `rows` int64[P], distinct, of logits float32[S, V], dense, in place: as runtime/logits.penalise.

    repetition, presence, frequency float32[P], prompt_mask bool[P, V], output_counts [P, V] of any number type.
    """
    count, vocabulary = prompt_mask.shape
    if not count:
        return
    kernel = kernel_for(logits.device, SOURCE, "penalise", ())
    columns = [column.contiguous() for column in (repetition, presence, frequency, prompt_mask, output_counts.float())]
    grid = (-(-vocabulary // PENALTY_THREADS), count)
    kernel(grid, (PENALTY_THREADS,), (logits, rows.contiguous(), *columns, np.int32(vocabulary)))
