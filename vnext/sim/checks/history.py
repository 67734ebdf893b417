"""Past: a state that was left behind stays as it was, whatever is folded afterwards, and can be given another future.

States share arenas and stores. A bug in that sharing writes into a state that somebody else still holds: a trial of the
scheduler into the engine's state, the replay of an old state into a newer one.
"""

from __future__ import annotations

from vnext.sched.schedule import schedule
from vnext.sim.checks.contents import contents, differences
from vnext.sim.checks.errors import Divergence
from vnext.sim.checks.plain_state import PlainState
from vnext.state.events import AnyEvent, RequestAborted, StepCommitted, pack_tokens
from vnext.state.reduce import reduce
from vnext.state.state import State


class History:
    """One event of the run: the states around it, and what they said then."""

    def __init__(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        self._before, self._event, self._after = before.state, event, after.state
        self._reported_before, self._reported_after = contents(before), contents(after)

    def require_unchanged(self, now: PlainState) -> None:
        """Y2: folding the event again gives the same state; another future changes neither the past nor the present."""
        reported_now = contents(now)
        again = reduce(self._before, self._event)
        self._same("the same event of the same state", self._reported_after, again)
        other_future(self._before)
        other_future(self._after)
        self._same("the state before", self._reported_before, self._before)
        self._same("the state after", self._reported_after, self._after)
        self._same("the state made again", self._reported_after, again)
        self._same("the newest state", reported_now, now.state)

    def _same(self, what: str, reported: dict[str, object], state: State) -> None:
        differ = differences(reported, contents(PlainState(state)))
        if differ:
            number = self._before.sequence
            raise Divergence(
                f"Y2: {what} has other {', '.join(differ)} after folding event {number} and other futures again"
            )


def other_future(state: State) -> State:
    """What might have been: one more step, an oldest step with other tokens, and the oldest request aborted."""
    plan = schedule(state)
    if plan is not None:
        state = reduce(state, plan)
    if state.in_flight:
        tokens = pack_tokens([1] * int(state.in_flight[0].samples.sum()))
        state = reduce(state, StepCommitted(step=state.committed, tokens=tokens))
    oldest = [entry.id for entry in state.waiting[:1]] + state.rows.id.tolist()[:1]
    return reduce(state, RequestAborted(ids=tuple(oldest), reason="client")) if oldest else state
