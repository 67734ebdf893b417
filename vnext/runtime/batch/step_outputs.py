"""The outputs of a step: sampled tokens and the log-probabilities asked for. Owns their types; runners fill them."""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.runtime.messages import PromptResult, TokenLogprobs
from vnext.sampling.inputs import Sampled


class StepOutputs(msgspec.Struct, frozen=True):
    """`tokens` int64[S]; `logprobs` one entry per sampled row (None where not asked for), empty if no row asked; `prompts` what
    the step computed of prompts."""

    tokens: np.ndarray
    logprobs: tuple[TokenLogprobs | None, ...]
    prompts: tuple[PromptResult, ...] = ()


NOTHING_SAMPLED = StepOutputs(np.empty(0, dtype=np.int64), ())


def reported(sampled: Sampled, asked: np.ndarray) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of the rows that asked for them, each with the number of alternatives it asked for."""
    if sampled.logprob is None:
        return ()
    logprobs, ranks = sampled.logprob.tolist(), sampled.rank.tolist()
    tokens, values = sampled.top_tokens.tolist(), sampled.top_logprobs.tolist()
    return tuple(
        TokenLogprobs(logprob=logprobs[at], rank=ranks[at], top=tuple(zip(tokens[at][:count], values[at][:count])))
        if count >= 0
        else None
        for at, count in enumerate(asked.tolist())
    )
