"""Prompt results: what the engine computed of a prompt, put together from the parts that its steps sent.

Owns the arithmetic of embeddings, and the requests whose results are an embedding or the score of a given answer. A part may
come twice, after a preemption, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vnext.runtime.messages import AdapterFiles, PromptResult, RequestOutput, SubmitRequest, TokenLogprobs
from vnext.sampling_params import InvalidRequest, context_exceeded
from vnext.state.events import pack_tokens
from vnext.state.params import POOLINGS, Constraint, Sampling

EMBEDDING_TOKENS = 1
"""An embedding's request asks for one token, which is dropped: a request of the engine ends with a sample."""


def prompt_logprobs(parts: Iterable[PromptResult], prompt_length: int) -> list[TokenLogprobs | None]:
    """One entry per token of the prompt, None for the first, which follows nothing."""
    entries: list[TokenLogprobs | None] = [None] * prompt_length
    for part in parts:
        logprobs, ranks = np.frombuffer(part.logprobs, np.float32), np.frombuffer(part.ranks, np.int32)
        shape = (len(ranks), len(part.top_tokens) // 4 // max(len(ranks), 1))
        tokens = np.frombuffer(part.top_tokens, np.int32).reshape(shape).tolist()
        tops = np.frombuffer(part.top_logprobs, np.float32).reshape(shape).tolist()
        for at, (logprob, rank, others, values) in enumerate(zip(logprobs.tolist(), ranks.tolist(), tokens, tops), part.first):
            entries[at] = TokenLogprobs(logprob=logprob, rank=rank, top=tuple(zip(others, values)))
    return entries


def routed_experts(parts: Iterable[PromptResult], count: int) -> np.ndarray | None:
    """int16 [count, layers, experts of a token]: the experts of the request's first `count` tokens, prompt and answer; None where
    the engine reports none."""
    found: np.ndarray | None = None
    for part in parts:
        if part.experts:
            ids = np.frombuffer(part.experts, np.int16).reshape(-1, *part.experts_shape)[: max(0, count - part.first)]
            found = np.full((count, *part.experts_shape), -1, np.int16) if found is None else found
            found[part.first : part.first + len(ids)] = ids
    return found


def embedding(parts: Iterable[PromptResult], dimensions: int | None, normalize: bool) -> np.ndarray:
    """float32 [dimensions] of the part that holds it: the first `dimensions` of the hidden state (None: all of them), scaled
    to length 1 if `normalize`. Raises InvalidRequest for more dimensions than there are."""
    hidden = next(np.frombuffer(part.hidden, np.float32) for part in parts if part.hidden)
    if dimensions is not None and not 1 <= dimensions <= len(hidden):
        raise InvalidRequest(
            f"dimensions is {dimensions}: it must lie between 1 and the model's hidden size of {len(hidden)}.", "dimensions"
        )
    cut = hidden[:dimensions].astype(np.float64)
    length = np.sqrt(np.dot(cut, cut)) if normalize else 1.0
    return (cut / (length or 1.0)).astype(np.float32)


def embedding_request(name: str, prompt: list[int], pooling: str, model_length: int) -> SubmitRequest:
    """The request whose result is the embedding of `prompt`. Raises InvalidRequest for an unknown pooling or a prompt that is
    too long."""
    if pooling not in POOLINGS[1:]:
        raise InvalidRequest(f"pooling is {pooling!r}: it must be one of {', '.join(POOLINGS[1:])}.", "pooling")
    room = model_length - EMBEDDING_TOKENS
    if len(prompt) > room:
        raise context_exceeded(room, f"the input has {len(prompt)} tokens", "input", "input")
    sampling = Sampling(seed=0, max_tokens=EMBEDDING_TOKENS, temperature=0.0, pooling=POOLINGS.index(pooling))
    return SubmitRequest(name=name, prompt=pack_tokens(prompt), sampling=sampling)


class Scoring:
    """The score of one answer while the engine computes it. Mutable.

    The prompt and all of the answer but its last token are a prompt whose tokens are scored. The last token is the only one that
    the request may sample, so it takes no room beyond its own. Penalties, temperature and limits do not change what is reported.
    """

    def __init__(
        self, name: str, prompt: list[int], answer: list[int], model_length: int, adapter: AdapterFiles | None = None
    ) -> None:
        """`answer` has a token at least. Raises InvalidRequest for more than `model_length` tokens together."""
        if (count := len(prompt) + len(answer)) > model_length:
            raise context_exceeded(model_length, f"prompt and answer have {count} tokens", "answer", "answers")
        self._first, self._scored = len(prompt), [*prompt, *answer[:-1]]
        self._prompt: list[PromptResult] = []
        self._last: tuple[TokenLogprobs, ...] = ()
        only = Constraint(allowed=(answer[-1],))
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=0, constraint=only, ignore_eos=True)
        self.request = SubmitRequest(name=name, prompt=pack_tokens(self._scored), sampling=sampling, adapter=adapter)

    def push(self, output: RequestOutput) -> None:
        """Take in an output of the request."""
        self._prompt += output.prompt
        self._last += output.logprobs

    def logprobs(self) -> list[float]:
        """Those of the answer's tokens, once the request has ended."""
        entries = [*prompt_logprobs(self._prompt, len(self._scored))[self._first :], *self._last]
        return [entry.logprob for entry in entries if entry is not None]
