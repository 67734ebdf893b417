"""Compares sampled tokens with recorded ones: which differ, and how close the two were."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from vnext.sampling.sampling import report
from vnext.state.state import State, sample_points


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A token that differs. `place` is among the step's samples; log-probabilities are this run's, from the logits
    before penalties and temperature."""

    place: int
    recorded: int
    again: int
    recorded_logprob: float
    again_logprob: float


class Sample(msgspec.Struct, frozen=True):
    """The sampled request, and the position of the token in it."""

    request: int
    position: int


def choice(place: int, recorded: int, again: int, logits: torch.Tensor) -> Choice:
    """A difference with its log-probabilities, from logits float32 [V]."""
    found = report(logits.expand(2, -1), torch.tensor([recorded, again]), 0).logprob
    assert found is not None, "log-probabilities were asked for"
    logprobs = found.tolist()
    return Choice(place=place, recorded=recorded, again=again, recorded_logprob=logprobs[0], again_logprob=logprobs[1])


def differing(recorded: np.ndarray, again: np.ndarray, logits: torch.Tensor | None) -> list[Choice]:
    """The differing samples of one step, in order."""
    places = np.flatnonzero(recorded != again).tolist()
    if logits is None:
        return []  # nothing was sampled
    return [choice(place, int(recorded[place]), int(again[place]), logits[place]) for place in places]


def samples_of(state: State) -> list[Sample]:
    """The samples of the newest step in flight, in order."""
    scheduled = state.in_flight[-1]
    points = sample_points(scheduled)
    ends = (scheduled.starts + scheduled.counts)[points.entries] - points.back
    return [Sample(*each) for each in zip(scheduled.ids[points.entries].tolist(), ends.tolist())]


def rows_of(state: State) -> list[tuple[int, int]]:
    """(request, position) of every token of the newest step in flight."""
    scheduled = state.in_flight[-1]
    entries = zip(scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist())
    return [(id_, start + place) for id_, start, count in entries for place in range(count)]
