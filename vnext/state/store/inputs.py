"""Inputs: what a prompt holds beside text, an image say, as tokens below 0 that spell the input's digest.

So whatever compares histories, block hashes above all, tells inputs apart; the input itself is needed only where it is computed.
Four tokens in a row spell a digest, 30 bits each, over and over; the first of an input has one bit more. No text has such a token.
Source of the idea: SGLang's padding of placeholders with values of an image's hash. In an engine of grids (`SchedulerConfig.grids`)
inputs are images whose tokens lie in rows of one length, and the last bytes of a digest tell how many. Two frames of a video are
an image; the last bit of the digest says that it goes on with the one before it, and the bytes before tell after how much time.
The tokens of a sound lie in no rows, and stand one behind the other as a text's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vnext.state.store.fields import DIGEST_WORDS, INPUT_BEGINS

DIGEST_SIZE = 15
ROWS_SIZE, STEP_SIZE = 2, 2
GOES_ON, STEP_MAX = 1 << 15, (1 << 16) - 1
TOKENS_MIN = DIGEST_WORDS
"""Of an input."""
BITS = 30


class Input(NamedTuple):
    """`length` tokens of a prompt from `start` on stand for the input with this `digest` (15 bytes)."""

    start: int
    length: int
    digest: bytes


def input_tokens(digest: bytes, length: int) -> np.ndarray:
    """The tokens of an input: int32 [length]. Raises ValueError for fewer than DIGEST_WORDS, and for another size of digest."""
    if length < DIGEST_WORDS or len(digest) != DIGEST_SIZE:
        raise ValueError(f"an input has {DIGEST_SIZE} bytes and {DIGEST_WORDS} tokens or more, not {len(digest)} and {length}")
    number = int.from_bytes(digest, "little")
    words = [number >> BITS * place & (1 << BITS) - 1 for place in range(DIGEST_WORDS)]
    tokens = ~np.resize(np.array(words, dtype=np.int32), length)
    tokens[0] += INPUT_BEGINS
    return tokens


def has_inputs(prompt: bytes) -> bool:
    """Whether there are tokens below 0 in a prompt (int32 bytes), which most have not; reads their signs alone."""
    return not prompt[3::4].isascii()


def inputs_in(tokens: np.ndarray) -> list[Input]:
    """The inputs of a prompt (int32 [n]) that `are_whole`, in order."""
    starts = (tokens < INPUT_BEGINS).nonzero()[0].tolist()
    found = []
    for start, limit in pairwise((*starts, len(tokens))):
        ends = (tokens[start:limit] >= 0).nonzero()[0]
        found.append(Input(start, int(ends[0]) if len(ends) else limit - start, digest_at(tokens, start)))
    return found


def length_at(tokens: np.ndarray, start: int) -> int:
    rest = tokens[start + 1 :]
    ends = np.flatnonzero((rest >= 0) | (rest < INPUT_BEGINS))
    return 1 + (int(ends[0]) if len(ends) else len(rest))


def digest_at(tokens: np.ndarray, start: int) -> bytes:
    words = (~tokens[start : start + DIGEST_WORDS] & (1 << BITS) - 1).tolist()
    number: int = sum(word << BITS * place for place, word in enumerate(words))
    return number.to_bytes(DIGEST_SIZE, "little")


def with_rows(digest: bytes, rows: int, step: int | None = None) -> bytes:
    """The digest of an input whose tokens lie in so many rows; `step`: so much later than those of the input before it, with which
    it goes on, None for one that begins anew."""
    if step is None:
        return digest[:-ROWS_SIZE] + rows.to_bytes(ROWS_SIZE, "little")
    return digest[: -ROWS_SIZE - STEP_SIZE] + step.to_bytes(STEP_SIZE, "little") + (rows | GOES_ON).to_bytes(ROWS_SIZE, "little")


def rows_of(digest: bytes) -> int:
    """In how many rows its tokens lie, 0 for a sound's."""
    return int.from_bytes(digest[-ROWS_SIZE:], "little") & ~GOES_ON


def step_of(digest: bytes) -> int | None:
    """How much later its tokens are than those of the input before it; None where it begins anew."""
    is_later = int.from_bytes(digest[-ROWS_SIZE:], "little") & GOES_ON
    return int.from_bytes(digest[-ROWS_SIZE - STEP_SIZE : -ROWS_SIZE], "little") if is_later else None


def hash_of(digest: bytes) -> bytes:
    """What of it tells inputs apart, whatever it says of places."""
    return digest[: -ROWS_SIZE - STEP_SIZE] if step_of(digest) is not None else digest[:-ROWS_SIZE]


def with_inputs(tokens: np.ndarray, inputs: list[Input]) -> np.ndarray:
    """A copy of the tokens (int32 [n]) in which these inputs stand in their places."""
    tokens = tokens.copy()
    for start, length, digest in inputs:
        tokens[start : start + length] = input_tokens(digest, length)
    return tokens


def are_whole(tokens: np.ndarray) -> bool:
    """Whether the tokens below 0 of a prompt (int32 [n]) spell inputs, each from its first token on."""
    inputs = inputs_in(tokens)
    if any(length < DIGEST_WORDS for _, length, _ in inputs):
        return False
    return np.array_equal(with_inputs(np.maximum(tokens, 0), inputs), tokens)
