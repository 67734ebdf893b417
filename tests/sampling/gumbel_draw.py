"""The draw by Gumbel-max: an independent reference of the distribution, with noise keyed by token id."""

from __future__ import annotations

import torch

from vnext.kernels.random import step_words
from vnext.kernels.random_numpy import Domain


def draw_by_gumbel(weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64[S] tokens as in `draw_by_inversion`, as argmax of log weight + Gumbel noise (Gumbel, 1954)."""
    tokens = torch.arange(weights.shape[1], device=weights.device)
    scores = weights.to(torch.float64).log_() + gumbel_noise(seed, position, tokens)
    best, token = scores.max(dim=-1)
    return torch.where(best.isfinite(), token, weights.shape[1])


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64[S, N] standard Gumbel noise of `tokens` int64[N], finite, a function of seed, position and token id."""
    word, _ = step_words(seed, position, tokens, Domain.GUMBEL)
    return -(-open_uniform(word).log_()).log_()


def open_uniform(word: torch.Tensor) -> torch.Tensor:
    """Words as float64 in the open interval (0, 1): a word of all ones stays below one, so its noise is finite.

    float64 because (2**32 - 0.5) / 2**32 rounds to 1.0 in float32.
    """
    return (word.to(torch.float64) + 0.5) * 2.0**-32
