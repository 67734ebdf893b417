"""Sampled tokens against recorded ones: which differ, and how near the two were. Owns the comparison of one token."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from vnext.state.state import State


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A token that came out otherwise. `place` among the step's samples; log-probabilities are those of this run, of the
    logits before penalties and temperature."""

    place: int
    recorded: int
    again: int
    recorded_logprob: float
    again_logprob: float


class Sample(msgspec.Struct, frozen=True):
    """Who is sampled, and the position of the token in its request."""

    request: int
    position: int


def choice(place: int, recorded: int, again: int, logits: torch.Tensor) -> Choice:
    """A difference with its log-probabilities, from logits float32 [V]."""
    logprobs = logits.log_softmax(-1)
    return Choice(
        place=place, recorded=recorded, again=again, recorded_logprob=float(logprobs[recorded]),
        again_logprob=float(logprobs[again]),
    )  # fmt: skip


def differing(recorded: np.ndarray, again: np.ndarray, logits: torch.Tensor | None) -> list[Choice]:
    """The samples of one step that differ, in their order."""
    places = np.flatnonzero(recorded != again).tolist()
    return [choice(place, int(recorded[place]), int(again[place]), logits[place]) for place in places]


def samples_of(state: State) -> list[Sample]:
    """The samples of the newest step in flight, in its order."""
    flight = state.flights[-1]
    sampled = flight.samples.nonzero()[0]
    ends = (flight.starts + flight.counts)[sampled].tolist()
    return [Sample(*each) for each in zip(flight.ids[sampled].tolist(), ends)]


def rows_of(state: State) -> list[tuple[int, int]]:
    """(request, position) of every token of the newest step in flight."""
    flight = state.flights[-1]
    entries = zip(flight.ids.tolist(), flight.starts.tolist(), flight.counts.tolist())
    return [(id_, start + place) for id_, start, count in entries for place in range(count)]
