"""Counter-based randomness without torch: the domains, and the reference implementation of `random`.

Owns what every random word means. Holds no state: a word is a function of its key and its counter, nothing else.
The second counter word is always a `Domain`, so two uses never share a word.

    seed -> step key   threefry2x32(seed, (position, POSITION))     one key for each token to be sampled
    step key -> noise  threefry2x32(step key, (counter, use))       counter: 0, or the token id for noise of a token
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
WORD_MAX = 0xFFFFFFFF
GROUPS = 5


class Domain(IntEnum):
    """Second counter word. A number is never given twice: recorded runs depend on it."""

    POSITION = 1
    INVERSION = 3
    GUMBEL = 4
    OUTSIDE = 5


Word = np.ndarray | np.uint32


def threefry2x32(
    key: tuple[np.ndarray, np.ndarray], counter: tuple[Word, Word]
) -> tuple[np.ndarray, np.ndarray]:
    """Threefry2x32 with 20 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).

    All arrays uint32 and broadcastable; returns two uint32 arrays of the common shape, at least one-dimensional.
    """
    first, second, *counters = (np.atleast_1d(np.asarray(word, dtype=np.uint32)) for word in (*key, *counter))
    schedule = (first, second, first ^ second ^ np.uint32(PARITY))
    left, right = counters[0] + first, counters[1] + second
    for group in range(GROUPS):
        for turn in ROTATIONS[group % 2]:
            left = left + right
            right = (right << np.uint32(turn)) | (right >> np.uint32(32 - turn))
            right = right ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def seed_words(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(high, low) words uint32[1] of a uint64 seed."""
    return np.array([seed >> 32], dtype=np.uint32), np.array([seed & WORD_MAX], dtype=np.uint32)


def step_words(seed: int, position: int, counter: np.ndarray, use: int) -> tuple[np.ndarray, np.ndarray]:
    """Two words uint32[N] of `use` for one token to be sampled; `counter` uint32[N]. Reference of `random.step_words`."""
    key = threefry2x32(seed_words(seed), (np.uint32(position), np.uint32(Domain.POSITION)))
    return threefry2x32(key, (counter, np.uint32(use)))
