"""A toy model that can be computed by hand, and its answer to one request alone.

The next token is (seed + the sum over positions p of (p + 1) * token) mod vocabulary: it depends on every token and on
every position. Where a constraint forbids that token, the next one that it allows is taken (toy_grammar.py). `answer` knows
nothing of steps, blocks or batches; the engine's streams must equal it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from vnext.sim.toy_grammar import allowed, fails, nearest
from vnext.state.config import SchedulerConfig
from vnext.state.outputs import Finish
from vnext.state.params import Sampling


class Answer(msgspec.Struct, frozen=True):
    """The sampled tokens and the reason why they ended ("" before that); "abort" where a constraint fails."""

    tokens: tuple[int, ...]
    finish: Finish


def next_token(history: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token after `history`."""
    return (seed + sum(place * token for place, token in enumerate(history, start=1))) % vocab_size


def constrained(config: SchedulerConfig, sampling: Sampling, tokens: Sequence[int], wanted: int) -> int:
    """The token that the model gives after an answer's `tokens` where it wants another."""
    if sampling.constraint is None:
        return wanted
    return nearest(wanted, np.array(sorted(allowed(sampling.constraint, tokens, config.vocab_size, config.eos_token_ids))))


def answer(config: SchedulerConfig, prompt: list[int], sampling: Sampling) -> Answer:
    """The whole answer to one request, computed alone."""
    place = len(prompt)
    tokens: list[int] = []
    total = sampling.seed + sum(at * token for at, token in enumerate(prompt, start=1))
    while len(tokens) < sampling.max_tokens:
        if sampling.constraint is not None and fails(sampling.constraint, tokens, config.vocab_size, config.eos_token_ids):
            return Answer(tuple(tokens), "abort")
        token = constrained(config, sampling, tokens, total % config.vocab_size)
        place += 1
        total += place * token
        tokens.append(token)
        ends = token in sampling.stop_token_ids or (token in config.eos_token_ids and not sampling.ignore_eos)
        if ends and len(tokens) > sampling.min_tokens:
            return Answer(tuple(tokens), "stop")
    return Answer(tuple(tokens), "length")
