"""A toy model that can be computed by hand, and what it answers to one request alone.

The next token is (seed + the sum over positions p of (p + 1) * token) mod vocabulary: it depends on every token and on
every position. `answer` knows nothing of steps, blocks or batches; the engine's streams must be equal to it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling


class Answer(msgspec.Struct, frozen=True):
    """What a client gets: sampled tokens and why they ended ("" while they have not)."""

    tokens: tuple[int, ...]
    finish: Literal["", "stop", "length", "abort"]


def next_token(history: list[int], seed: int, vocab_size: int) -> int:
    """The token after `history`."""
    return (seed + sum(place * token for place, token in enumerate(history, start=1))) % vocab_size


def answer(config: SchedulerConfig, prompt: list[int], sampling: Sampling) -> Answer:
    """The whole answer to one request, as if it were the only one in the world."""
    place, tokens = len(prompt), []
    total = sampling.seed + sum(at * token for at, token in enumerate(prompt, start=1))
    while len(tokens) < sampling.max_tokens:
        token = total % config.vocab_size
        place += 1
        total += place * token
        tokens.append(token)
        ends = token in sampling.stop_token_ids or (token in config.eos_token_ids and not sampling.ignore_eos)
        if ends and len(tokens) > sampling.min_tokens:
            return Answer(tuple(tokens), "stop")
    return Answer(tuple(tokens), "length")
