"""Prompts: what requests want of their prompts' positions, log-probabilities and embeddings, and its computation.

Owns which hidden states of a step are needed and what becomes of them. Rows that want nothing of their prompt cost nothing,
and so do the steps of an answer. Logits are computed for REPORTED_TOGETHER positions at a time, whatever the step's size.
A result depends on its own prompt only: a mean is summed position by position, in float64, however the prompt is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vnext.runtime.messages import PromptResult
from vnext.sampling.sampling import REPORTED_TOGETHER, report
from vnext.state.events import unpack_tokens
from vnext.state.params import CLS, LAST, MEAN, NO_LOGPROBS, NO_POOLING
from vnext.state.state import Request, StepInFlight

Send = Callable[[torch.Tensor], torch.Tensor]


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """The Send of the CPU."""
    return tensor


class PromptRange(NamedTuple):
    """Positions [first, first + count) of one request's prompt, of which a step computes what `pooling` names: with
    NO_POOLING the log-probabilities of the tokens that follow."""

    request: Request
    pooling: int
    first: int
    count: int


class PromptInputs(NamedTuple):
    """The hidden states that a step's prompts need: `at` int64 [P], indices among the step's tokens, range by range; the first
    `len(targets)` are scored, `targets` int64 are the tokens that follow them. `live`: requests that want something."""

    at: np.ndarray
    targets: np.ndarray
    ranges: tuple[PromptRange, ...]
    live: frozenset[int]

    @property
    def alternatives(self) -> int:
        """The most that a request of this step wants beside each token."""
        return max(each.request.sampling.prompt_logprobs for each in self.ranges)


class PromptRows:
    """The batch rows whose requests want something of their prompt. Mutable."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def join(self, place: int, request: Request) -> None:
        """A request takes a batch row."""
        if request.sampling.prompt_logprobs != NO_LOGPROBS or request.sampling.pooling != NO_POOLING:
            self._requests[place] = request

    def leave(self, place: int) -> None:
        self._requests.pop(place, None)

    def inputs(self, scheduled: StepInFlight, places: np.ndarray, query_starts: np.ndarray) -> PromptInputs | None:
        """What this step computes of them; None for nothing. `places` int64 [R]: the entries' rows; `query_starts` int [R + 1]."""
        if not self._requests:
            return None
        found = [
            (each, int(query_starts[entry] - scheduled.starts[entry]))
            for entry, place in enumerate(places.tolist())
            if (request := self._requests.get(place)) is not None
            for each in ranges_of(request, int(scheduled.starts[entry]), int(scheduled.counts[entry]))
        ]
        if not found:
            return None
        found.sort(key=lambda pair: pair[0].pooling)  # those that are scored come first
        at = [np.arange(each.first, each.first + each.count) + offset for each, offset in found]
        targets = [
            unpack_tokens(each.request.prompt)[each.first + 1 :][: each.count]
            for each, _ in found
            if each.pooling == NO_POOLING
        ]
        return PromptInputs(
            np.concatenate(at),
            np.concatenate([np.empty(0, np.int64), *targets]).astype(np.int64),
            tuple(each for each, _ in found),
            frozenset(request.id for request in self._requests.values()),
        )


def ranges_of(request: Request, start: int, count: int) -> list[PromptRange]:
    """What a step that computes positions [start, start + count) of a request computes of its prompt."""
    length, sampling = request.prompt_length, request.sampling
    wanted = {MEAN: (0, length), LAST: (length - 1, length), CLS: (0, 1)}
    spans = [(sampling.pooling, *wanted[sampling.pooling])] if sampling.pooling else []
    if sampling.prompt_logprobs != NO_LOGPROBS:
        spans.append((NO_POOLING, 0, length - 1))
    cut = [(pooling, max(first, start), min(end, start + count)) for pooling, first, end in spans]
    return [PromptRange(request, pooling, first, end - first) for pooling, first, end in cut if first < end]


class Places(NamedTuple):
    """Which hidden states a forward returns: int64 `at`, rising indices among the step's tokens, as kernels take them; and
    which of them are the samples' [S] and the prompts' [P]."""

    at: torch.Tensor
    samples: torch.Tensor
    prompts: torch.Tensor


def places_of(sample_at: np.ndarray, prompts: PromptInputs, send: Send = keep) -> Places:
    """For samples at `sample_at` int64 [S]. `send` brings host tensors to the device."""
    at = np.union1d(sample_at, prompts.at)
    return Places(*(send(torch.from_numpy(each)) for each in (at, at.searchsorted(sample_at), at.searchsorted(prompts.at))))


def compute(
    prompts: PromptInputs, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], send: Send = keep
) -> list[torch.Tensor]:
    """From hidden states [P, hidden]: `logprob`, `rank`, `top_tokens` and `top_logprobs` of Sampled for the scored positions,
    if there are any, and at the end the other hidden states in float32. Waits for no device."""
    targets = send(torch.from_numpy(prompts.targets))
    parts = zip(hidden[: len(targets)].split(REPORTED_TOGETHER), targets.split(REPORTED_TOGETHER), strict=True)
    scored = [report(logits_of(rows), tokens, prompts.alternatives) for rows, tokens in parts if len(tokens)]
    return [*map(torch.cat, list(zip(*scored))[1:]), hidden[len(targets) :].float()]


class PromptSums:
    """Turns computed tensors into results, step by step; keeps the sums of means that are not complete. Mutable."""

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}

    def results(self, prompts: PromptInputs, computed: Sequence[torch.Tensor]) -> tuple[PromptResult, ...]:
        """The results of one step from the tensors of `compute`, on the host."""
        self._sums = {id_: total for id_, total in self._sums.items() if id_ in prompts.live}
        *scored, hidden = (tensor.numpy() for tensor in computed)
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
        if each.pooling != MEAN:
            return [PromptResult(id=request.id, hidden=hidden[0].tobytes())]
        total = self._sums[request.id] if each.first else np.zeros(hidden.shape[1])
        for row in hidden:  # one after the other: sums in another order have other bits
            total = total + row
        self._sums[request.id] = total
        if each.first + each.count < request.prompt_length:
            return []
        mean = self._sums.pop(request.id) / request.prompt_length
        return [PromptResult(id=request.id, hidden=mean.astype(np.float32).tobytes())]


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
