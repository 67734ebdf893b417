"""The states of a rank's recurrent layers: of each page, the digest of the tokens that have gone through it."""

from __future__ import annotations

from collections.abc import Sequence

from vnext.sim.checks.plain_state import Divergence
from vnext.state.state import State
from vnext.state.store.fields import LIVE, NEWEST, NEWEST_EDGE

UNKNOWN = -1


class ShadowStates:
    """Mutable. Each request's state must be that of its own tokens, token after token: from zeros or from a copy."""

    def __init__(self, page_count: int) -> None:
        self._pages: list[int] = [UNKNOWN] * page_count

    def run(self, state: State, works: Sequence[tuple[int, list[int], int, int]]) -> None:
        """The newest step of a state: `works` are row, digests by position, start and end of each request, with the drafts that are
        kept. Divergence if a state or a snapshot is of other tokens."""
        step, recurrent = state.in_flight[-1], state.rows.recurrent
        if step.copies is None or recurrent is None:
            return
        live, newest, edges = recurrent[[LIVE, NEWEST, NEWEST_EDGE]].tolist()
        self._copy(step.copies.before.tolist())
        for row, chains, start, end in works:
            if start and self._pages[live[row]] != chains[start - 1]:
                raise Divergence(f"N1: the state of row {row} is not that of its first {start} tokens")
            self._pages[live[row]] = chains[end - 1]
        self._copy(step.copies.after.tolist())
        for row, chains, _, _ in works:
            if edges[row] and self._pages[newest[row]] != chains[edges[row] - 1]:
                raise Divergence(f"N1: the snapshot of row {row} is not that of its first {edges[row]} tokens")

    def content(self, page: int) -> list[int]:
        return [self._pages[page]]

    def fill(self, page: int, content: list[int]) -> None:
        """A page has been read from disk."""
        (self._pages[page],) = content

    def _copy(self, pairs: list[list[int]]) -> None:
        """One after another."""
        for source, target in pairs:
            self._pages[target] = self._pages[source]
