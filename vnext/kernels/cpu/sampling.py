"""Sampling: a token for each row of logits. What a token is, and why it is exact: `vnext/runtime/sampling_weights.py`.

Knows no penalties, bias or bans: those are in the logits already.
"""

from __future__ import annotations

import torch

from vnext.kernels.cpu.native import module


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """int64[S] tokens of `logits` float32[S, V], V at most 2**22, each row's elements side by side (else it is copied).

    `temperature` (0: greedy), `top_p` (1: off) and `min_p` (0: off) are float32[S]; `top_k` (0: off), `seed` and
    `position` int64[S]. The greedy token is the lowest id of the largest logit, or the first NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    columns = (temperature, top_k, top_p, min_p, seed, position)
    if not all(column.is_contiguous() for column in columns):
        columns = tuple(column.contiguous() for column in columns)
    tokens = torch.empty(rows, dtype=torch.int64)
    module().sample_rows(
        logits.data_ptr(), logits.stride(0), rows, vocabulary, *(column.data_ptr() for column in columns),
        tokens.data_ptr(),
    )  # fmt: skip
    return tokens
