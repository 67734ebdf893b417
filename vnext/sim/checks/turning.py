"""Turning: occasionally a simulation also computes a commit's steady turn, which must equal the reducer and the scheduler.

Owns the comparison. The turn is computed first and then discarded, so both are futures of one state, and neither may
disturb the other.
"""

from __future__ import annotations

from vnext.sched.schedule import schedule
from vnext.sched.turn import Turn, steady_turn
from vnext.sim.checks.contents import contents, differences
from vnext.sim.checks.errors import Divergence
from vnext.sim.checks.plain_state import PlainState
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, StepCommitted
from vnext.state.reduce import reduce
from vnext.state.state import State

TURN_COMMITS = 3
"""The number of commits between two turns that are computed."""


def turn_of(before: State, event: AnyEvent) -> Turn | None:
    """The steady turn that begins with this event, if one is due."""
    if isinstance(event, StepCommitted) and event.step % TURN_COMMITS == 0:
        return steady_turn(before, event)
    return None


def require_same(turn: Turn, after: State) -> None:
    """Raise Divergence unless the scheduler's plan leads from the state after the commit to the turn's state."""
    plan = schedule(after)
    if plan != turn.plan:
        raise Divergence(f"a turn goes on with {turn.plan} where the scheduler says {plan}")
    expected = reduce(after, plan)
    differ = differences(contents(PlainState(turn.state)), contents(PlainState(expected)))
    if differ or digest(turn.state) != digest(expected):
        raise Divergence(f"a turn is not what its events make: {', '.join(differ) or 'the digest'}")
