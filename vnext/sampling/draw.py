"""The draw: one token for each row from integer weights, by inverting the distribution function or by Gumbel-max.

Owns the use of random words for tokens. A draw reads only the (seed, position) of its own row.
The engine uses `draw_by_inversion`. It takes two words for each row whatever the vocabulary size, and its integer
arithmetic is exact, so the token is the same in any batch, order and padding, and on any device with equal weights.
`draw_by_gumbel` is an independent reference for tests: noise keyed by token id, one word for every token of the
vocabulary, which is expensive on a CPU.
"""

from __future__ import annotations

import torch

from vnext.kernels.random import open_uniform, step_words
from vnext.kernels.random_numpy import Domain

HALF_BITS = 31
HALF_MAX = 2**HALF_BITS - 1


def draw_by_inversion(weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64[S] tokens, each with probability weight / sum of weights (62 random bits).

    `weights` int64[S, V] with row sums below 2**62; `seed` and `position` int64[S]. A row of zero weights gives V,
    which is not a token.
    """
    mass = weights.cumsum(dim=-1)
    words = step_words(seed, position, torch.zeros(1, dtype=torch.int64, device=seed.device), Domain.INVERSION)
    target = scale(words[0], words[1], mass[:, -1:])
    return torch.searchsorted(mass, target, right=True)[:, 0]


def scale(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(u * total / 2**62), where u is the upper 31 bits of `first`, then those of `second`; all int64, total < 2**62.

    Computed in halves of 31 bits, so that every product and sum fits int64.
    """
    high, low = first >> 1, second >> 1
    total_high, total_low = total >> HALF_BITS, total & HALF_MAX
    middle = high * total_low + low * total_high + ((low * total_low) >> HALF_BITS)
    scaled: torch.Tensor = high * total_high + (middle >> HALF_BITS)
    return scaled


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
