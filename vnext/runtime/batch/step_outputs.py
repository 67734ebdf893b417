"""The outputs of a step: sampled tokens and the log-probabilities asked for. Owns their types; runners fill them."""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.runtime.protocol.messages import PromptResult, TokenLogprobs
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.sampling.inputs import Sampled
from vnext.state.state import StepInFlight, sample_points


class StepOutputs(msgspec.Struct, frozen=True):
    """`tokens` int64[S]; `logprobs` one entry per sampled row (None where not asked for), empty if no row asked; `prompts` what
    the step computed of prompts; `spoilt` the sampled rows whose logits were no numbers."""

    tokens: np.ndarray
    logprobs: tuple[TokenLogprobs | None, ...]
    prompts: tuple[PromptResult, ...] = ()
    spoilt: tuple[int, ...] = ()


NOTHING_SAMPLED = StepOutputs(np.empty(0, dtype=np.int64), ())


def reported(sampled: Sampled, asked: np.ndarray) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of the rows that asked for them, each with the number of alternatives it asked for."""
    if sampled.logprob is None:
        return ()
    assert sampled.rank is not None and sampled.top_tokens is not None and sampled.top_logprobs is not None, "they come together"
    logprobs, ranks = sampled.logprob.tolist(), sampled.rank.tolist()
    tokens, values = sampled.top_tokens.tolist(), sampled.top_logprobs.tolist()
    return tuple(
        TokenLogprobs(logprob=logprobs[at], rank=ranks[at], top=tuple(zip(tokens[at][:count], values[at][:count])))
        if count >= 0
        else None
        for at, count in enumerate(asked.tolist())
    )


def spoilt_rows(logits: np.ndarray, tokens: np.ndarray) -> tuple[int, ...]:
    """The rows of logits float32[S, V] with a NaN: their tokens, int64[S], are the first one's ids (kernels/cpu/sampling.py)."""
    found = np.isnan(logits[np.arange(len(tokens)), tokens])
    return tuple(found.nonzero()[0].tolist())


def spoilt_requests(scheduled: StepInFlight, outputs: StepOutputs) -> tuple[tuple[int, str], ...]:
    """(request, why) of a step's requests of which it computed what is no number, each once."""
    found = [int(scheduled.ids[sample_points(scheduled).entries[at]]) for at in outputs.spoilt]
    found += [int(each.id) for each in outputs.prompts if _is_spoilt(each)]
    return tuple(dict.fromkeys((id_, NOT_A_NUMBER) for id_ in found))


def _is_spoilt(result: PromptResult) -> bool:
    """Whether a prompt's log-probabilities or its embedding hold what is no number."""
    return any(np.isnan(np.frombuffer(data, np.float32)).any() for data in (result.logprobs, result.hidden))
