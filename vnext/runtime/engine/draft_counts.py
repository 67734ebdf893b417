"""The drafts of each live request, for its client: how many became tokens of the answer and how many did not."""

from __future__ import annotations

import numpy as np

from vnext.state.fold_commit import MatchedSamples
from vnext.state.state import State

NO_DRAFTS = 0, 0


class DraftCounts:
    """Counts by request number. Mutable."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def take(self, before: State, matched: MatchedSamples) -> None:
        """A commit that was folded into `before`. A draft behind the answer's end did not become a token."""
        runs = matched.runs
        if runs is None or not runs.drafted.any():
            return
        taken = np.bincount(matched.rows, minlength=len(before.rows))[runs.rows]
        for id_, count, drafted in zip(before.rows.id[runs.rows].tolist(), taken.tolist(), runs.drafted.tolist()):
            accepted, rejected = self._counts.get(id_, NO_DRAFTS)
            self._counts[id_] = accepted + count - 1, rejected + drafted - count + 1

    def pop(self, id_: int) -> tuple[int, int]:
        """The accepted and the rejected drafts of a request that ends."""
        return self._counts.pop(id_, NO_DRAFTS)
