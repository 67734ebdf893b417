"""The draw: one token a row from integer weights, by inverse distribution function or by Gumbel-max.

Owns the use of random words for tokens. A draw reads (seed, position) of its own row and nothing else.
`draw_by_inversion` is the product's: two words a row whatever the vocabulary, and exact integer arithmetic, so it gives
the same token in any batch, order, padding and on any device that weighs alike. `draw_by_gumbel` is its independent
twin in tests: noise keyed by token id, one word for every token of the vocabulary, dear on a CPU.
"""

from __future__ import annotations

import torch

from vnext.kernels.random import open_uniform, step_words
from vnext.kernels.random_numpy import Domain

HALF_BITS = 31
HALF_MAX = 2**HALF_BITS - 1


def draw_by_inversion(weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64[S] tokens, each with probability weight / sum of weights (62 random bits).

    `weights` int64[S, V] whose rows sum to less than 2**62, `seed` and `position` int64[S]. A row that weighs nothing
    gives V, which is no token.
    """
    mass = weights.cumsum(dim=-1)
    words = step_words(seed, position, torch.zeros(1, dtype=torch.int64, device=seed.device), Domain.INVERSION)
    target = scale(words[0], words[1], mass[:, -1:])
    return torch.searchsorted(mass, target, right=True)[:, 0]


def scale(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(u * total / 2**62) with u the upper 31 bits of `first`, then those of `second`; all int64, total < 2**62.

    In halves of 31 bits, so that no product and no sum leaves int64.
    """
    high, low = first >> 1, second >> 1
    total_high, total_low = total >> HALF_BITS, total & HALF_MAX
    middle = high * total_low + low * total_high + ((low * total_low) >> HALF_BITS)
    return high * total_high + (middle >> HALF_BITS)


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
