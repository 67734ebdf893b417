"""Drafts as a log shows them: how many a step made behind a request's tokens, and which of them were right.

A draft follows from the request's tokens, and a hypothetical run gives each request its recorded ones. So a draft that the
log shows is made again, and is right or wrong again. Of other drafts the log says nothing: they are made, and wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from vnext.state.events import StepCommitted
from vnext.state.samples import runs_in
from vnext.state.state import StepInFlight


class DraftsSeen(msgspec.Struct, frozen=True):
    """By request and place in its answer: `right` says whether a draft there was, `most` how many a step made from there on
    that could have had more."""

    right: dict[int, dict[int, bool]]
    most: dict[int, dict[int, int]]

    def hear(self, scheduled: StepInFlight, event: StepCommitted, answers: Mapping[int, Sequence[int]]) -> None:
        """Take in the commit of a step; `answers` are the tokens reported before it."""
        if scheduled.drafts is None or not scheduled.drafts.any():
            return
        sampled = scheduled.samples
        counts, drafted = runs_in(event, int(np.count_nonzero(sampled)))
        lines = zip(scheduled.ids[sampled].tolist(), scheduled.drafts[sampled].tolist(), counts.tolist(), drafted.tolist())
        for id_, planned, count, made in lines:
            place, right = len(answers.get(id_, ())), self.right.setdefault(id_, {})
            right.update((place + at, at < count - 1) for at in range(min(made, count)))
            if made < planned:
                self.most.setdefault(id_, {})[place] = made

    def run(self, id_: int, place: int, planned: int) -> tuple[int, int]:
        """How many drafts a step makes behind a request's answer of `place` tokens, and how many of them are kept."""
        made, right = min(planned, self.most.get(id_, {}).get(place, planned)), self.right.get(id_, {})
        kept = next((at for at in range(made) if not right.get(place + at, False)), made)
        return made, kept
