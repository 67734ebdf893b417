"""Prompts: what requests want of their prompts' positions, log-probabilities and embeddings.

Owns which hidden states of a step are needed; `prompt_results.py` computes with them. Rows that want nothing of their prompt cost
nothing, and so do the steps of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.state.events import unpack_tokens
from vnext.state.params import CLS, LAST, MAX, MEAN, NO_LOGPROBS, NO_POOLING
from vnext.state.state import Request, StepInFlight


class PromptRange(msgspec.Struct, frozen=True):
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


def prompt_inputs(
    requests: Mapping[int, Request], scheduled: StepInFlight, places: np.ndarray, query_starts: np.ndarray
) -> PromptInputs | None:
    """What this step computes of prompts, of the rows whose `requests` want something of theirs; None for nothing. `places` int64
    [R]: the entries' rows; `query_starts` int [R + 1]."""
    found = [
        (each, int(query_starts[entry] - scheduled.starts[entry]))
        for entry, place in enumerate(places.tolist())
        if (request := requests.get(place)) is not None
        for each in ranges_of(request, int(scheduled.starts[entry]), int(scheduled.counts[entry]))
    ]
    if not found:
        return None
    found.sort(key=lambda pair: pair[0].pooling)  # those that are scored come first
    at = [np.arange(each.first, each.first + each.count) + offset for each, offset in found]
    scored = [each for each, _ in found if each.pooling == NO_POOLING]
    targets = [unpack_tokens(each.request.prompt)[each.first + 1 :][: each.count] for each in scored]
    return PromptInputs(
        np.concatenate(at),
        np.concatenate([np.empty(0, np.int64), *targets]).astype(np.int64),
        tuple(each for each, _ in found),
        frozenset(request.id for request in requests.values()),
    )


def ranges_of(request: Request, start: int, count: int) -> list[PromptRange]:
    """What a step that computes positions [start, start + count) of a request computes of its prompt."""
    length, sampling = request.prompt_length, request.sampling
    wanted = {MEAN: (0, length), LAST: (length - 1, length), CLS: (0, 1), MAX: (0, length)}
    spans = [(sampling.pooling, *wanted[sampling.pooling])] if sampling.pooling else []
    if sampling.prompt_logprobs != NO_LOGPROBS:
        spans.append((NO_POOLING, 0, length - 1))
    cut = [(pooling, max(first, start), min(end, start + count)) for pooling, first, end in spans]
    return [PromptRange(request, pooling, first, end - first) for pooling, first, end in cut if first < end]
