"""The draw: one token for each row from integer weights, by inverting the distribution function.

Owns the use of random words for tokens. A draw reads only the (seed, position) of its own row.
It takes two words for each row whatever the vocabulary size, and its integer arithmetic is exact, so the token is the
same in any batch, order and padding, and on any device with equal weights.
"""

from __future__ import annotations

import torch

from vnext.kernels.random import step_words
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
