"""Counter-based randomness on a torch device: words are functions of (seed, position, counter, use).

Owns the torch form of Threefry2x32-20 and of the key of a step. May not hold state or call a generator: the same
arguments give the same bits in any batch, order, process and on any device (integer arithmetic only).
A word is a uint32 kept in an int64 tensor, because torch has few operations on unsigned types.
Reference implementation and the meaning of the domains: `random_numpy`.
"""

from __future__ import annotations

import torch

from vnext.kernels.random_numpy import GROUPS, PARITY, ROTATIONS, WORD_MAX, Domain

Words = tuple[torch.Tensor, torch.Tensor]


def threefry2x32(key: Words, counter: Words) -> Words:
    """Threefry2x32 with 20 rounds (Salmon et al., SC 2011); zero key and counter give 6b200159 99ba4efe.

    All tensors int64 with values in [0, 2**32), broadcastable; returns two such tensors of the common shape.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    left, right = torch.broadcast_tensors(counter[0] + schedule[0], counter[1] + schedule[1])
    left, right = left & WORD_MAX, right & WORD_MAX
    for group in range(GROUPS):
        for turn in ROTATIONS[group % 2]:
            left = (left + right) & WORD_MAX
            right = rotate(right, turn) ^ left
        left = (left + schedule[(group + 1) % 3]) & WORD_MAX
        right = (right + schedule[(group + 2) % 3] + (group + 1)) & WORD_MAX
    return left, right


def rotate(word: torch.Tensor, turn: int) -> torch.Tensor:
    """Each uint32 turned left by `turn` bits, 0 < turn < 32."""
    return ((word << turn) & WORD_MAX) | (word >> (32 - turn))


def seed_words(seed: torch.Tensor) -> Words:
    """(high, low) words of seeds given as int64 bit patterns of uint64, any shape."""
    return (seed >> 32) & WORD_MAX, seed & WORD_MAX


def step_key(seed: torch.Tensor, position: torch.Tensor) -> Words:
    """Key of the token at `position` of the request with root key `seed`: words of the same shape.

    `seed` int64 bit patterns of uint64, `position` int64 below 2**32.
    """
    return threefry2x32(seed_words(seed), (position & WORD_MAX, torch.full_like(position, Domain.POSITION)))


def step_words(seed: torch.Tensor, position: torch.Tensor, counter: torch.Tensor, use: int) -> Words:
    """Two words of `use` for each token to be sampled.

    `seed` and `position` int64[S]; `counter` int64[N] gives words int64[S, N], each a function of its own counter
    value only, so a wider or reordered range of counters changes no word.
    """
    high, low = step_key(seed, position)
    return threefry2x32((high[:, None], low[:, None]), (counter[None, :], torch.full_like(counter, use)[None, :]))
