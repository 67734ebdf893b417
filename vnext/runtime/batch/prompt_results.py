"""What becomes of the hidden states that prompts need: log-probabilities and embeddings.

Logits are computed for REPORTED_TOGETHER positions at a time, whatever the step's size. A result depends on its own prompt only: a
mean is summed position by position, in float64, however the prompt is cut. `prompt_tensors.py` does the same with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vnext.runtime.batch.prompts import PromptInputs, PromptRange
from vnext.runtime.protocol.messages import PromptResult
from vnext.sampling import host
from vnext.sampling.inputs import REPORTED_TOGETHER
from vnext.state.params import MAX, MEAN, NO_POOLING
from vnext.state.state import Request

Tail = Callable[[np.ndarray], np.ndarray]
"""float32 [hidden] -> float32 [out]."""


class Places(NamedTuple):
    """Which hidden states a forward returns: int64 `at`, rising indices among the step's tokens, as kernels take them; and
    which of them are the samples' [S] and the prompts' [P]."""

    at: np.ndarray
    samples: np.ndarray
    prompts: np.ndarray


def places_of(sample_at: np.ndarray, prompts: PromptInputs) -> Places:
    """For samples at `sample_at` int64 [S]."""
    at = np.union1d(sample_at, prompts.at)
    return Places(at, at.searchsorted(sample_at), at.searchsorted(prompts.at))


def compute(
    prompts: PromptInputs, hidden: np.ndarray, logits_of: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """From hidden states [P, hidden]: `logprob`, `rank`, `top_tokens` and `top_logprobs` of Sampled for the scored positions,
    if there are any, and at the end the other hidden states in float32. Of arrays, by the compiled kernels."""
    targets, scored = prompts.targets, []
    for first in range(0, len(targets), REPORTED_TOGETHER):
        tokens = targets[first : first + REPORTED_TOGETHER]
        scored.append(host.report(logits_of(hidden[first : first + len(tokens)]), tokens, prompts.alternatives))
    return [*map(np.concatenate, list(zip(*scored))[1:]), hidden[len(targets) :].astype(np.float32)]


class PromptSums:
    """Turns computed tensors into results, step by step; keeps what is there of means and maxima that are not complete. Mutable."""

    def __init__(self, tail: Tail | None = None) -> None:
        """`tail`: what a text's vector goes through; None for nothing."""
        self._sums: dict[int, np.ndarray] = {}
        self._tail = tail

    def results(self, prompts: PromptInputs, computed: Sequence[np.ndarray]) -> tuple[PromptResult, ...]:
        self._sums = {id_: total for id_, total in self._sums.items() if id_ in prompts.live}
        *scored, hidden = computed
        results, at, pooled_at = [], 0, 0
        for each in prompts.ranges:
            if each.pooling == NO_POOLING:
                results.append(scores(each, [column[at : at + each.count] for column in scored]))
                at += each.count
            else:
                results += self._pooled(each, hidden[pooled_at : pooled_at + each.count])
                pooled_at += each.count
        return tuple(results)

    def _pooled(self, each: PromptRange, hidden: np.ndarray) -> list[PromptResult]:
        request = each.request
        if each.pooling not in (MEAN, MAX):
            return [self._result(request, hidden[0])]
        total = self._sums[request.id] if each.first else np.full(hidden.shape[1], 0.0 if each.pooling == MEAN else -np.inf)
        for row in hidden:  # one after the other: sums in another order have other bits
            total = total + row if each.pooling == MEAN else np.maximum(total, row)
        self._sums[request.id] = total
        if each.first + each.count < request.prompt_length:
            return []
        pooled = self._sums.pop(request.id) / (request.prompt_length if each.pooling == MEAN else 1)
        return [self._result(request, pooled.astype(np.float32))]

    def _result(self, request: Request, vector: np.ndarray) -> PromptResult:
        return PromptResult(id=request.id, hidden=(self._tail(vector) if self._tail else vector).tobytes())


def scores(each: PromptRange, columns: Sequence[np.ndarray]) -> PromptResult:
    """The log-probabilities of one range from the columns of `compute`."""
    logprobs, ranks, top_tokens, top_logprobs = columns
    count = min(each.request.sampling.prompt_logprobs, top_tokens.shape[1])
    return PromptResult(
        id=each.request.id,
        first=each.first + 1,
        logprobs=logprobs.tobytes(),
        ranks=ranks.astype(np.int32).tobytes(),
        top_tokens=top_tokens[:, :count].astype(np.int32).tobytes(),
        top_logprobs=np.ascontiguousarray(top_logprobs[:, :count]).tobytes(),
    )
