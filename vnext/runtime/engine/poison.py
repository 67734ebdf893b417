"""Poison: which requests may have killed the ranks, from the steps that were in flight when they died. Pure but for its memory.

A request that kills its ranks does so again where it has come to the same token. So after the second death in a row a request
that was in flight at both and has got no token between is suspected. If there was no other in flight at either, it is to blame.
Else the engine goes on cautiously: requests join the batch one at a time, so that the next death has one suspect, which is to
blame.
A request that has got no more tokens than may have been sampled and lost with their steps at the death before (`_lost_max`) is not
blamed, but does not leave another as the only suspect either. One case is left in doubt: a prompt whose last token is computed in
the step in which the next request joins. Of these two, should they come again, the one that joined is blamed, and the other one if
it comes once more.
"""

from __future__ import annotations

from typing import NamedTuple

from vnext.state.events import RequestId
from vnext.state.state import State


class Verdict(NamedTuple):
    """The request to blame, None for none, and EngineRecovered.cautious."""

    blamed: RequestId | None
    cautious: int


class PoisonGuard:
    """What was in flight at the last death. Mutable."""

    def __init__(self) -> None:
        self._before: dict[RequestId, int] = {}  # by request, the tokens known
        self._lost_max = 0
        self._suspects: set[RequestId] = set()
        self._doubted: set[RequestId] = set()  # those that went free when the other one was blamed
        self._is_cautious = False

    def judge(self, state: State) -> Verdict:
        """Take the ranks' death in this state."""
        flown = in_flight(state)
        if not flown:
            return Verdict(None, state.cautious)
        got = {id_: known - self._before[id_] for id_, known in flown.items() if id_ in self._before}
        suspects = {id_ for id_, count in got.items() if count <= self._lost_max}
        same = {id_ for id_ in suspects if not got[id_]}
        is_alone = len(flown) == 1 == len(self._before)
        is_clear = len(suspects) == 1 and (is_alone or self._is_cautious)
        is_again = self._is_cautious and suspects == self._suspects
        per_step = 1 + (state.config.speculation.num_speculative_tokens if state.config.speculation else 0)
        self._before, self._lost_max, self._suspects = flown, (len(state.in_flight) - 1) * per_step, suspects
        if same and (is_clear or is_again):
            blamed = next(id_ for id_ in reversed(flown) if id_ in (same & self._doubted or same))
            self._doubted = suspects - {blamed}
            del flown[blamed]
            self._is_cautious = False
            return Verdict(blamed, 0)
        self._is_cautious = bool(suspects)
        return Verdict(None, state.next_id if suspects else 0)


def in_flight(state: State) -> dict[RequestId, int]:
    """The live requests in steps in flight, in the order of the batch, and how many of their tokens are known."""
    known = dict(zip(state.rows.id.tolist(), state.rows.known.tolist()))
    known |= {entry.id: len(entry.tokens) // 4 for entry in state.waiting}
    flown = {id_ for step in state.in_flight for id_ in step.ids.tolist()}
    return {RequestId(id_): count for id_, count in known.items() if id_ in flown}
