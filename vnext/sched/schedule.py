"""The decision: plan = schedule(state). Pure, made in one place, and carried by one event.

Prefill and decode are not separate: each request has known and computed tokens, and each step lets computed catch up
with known under one token budget. Running requests come first, in order; then waiting requests in policy order, up to
the first that does not fit. When pages run out, the worst running requests are preempted, and that step admits nothing.
A cautious state (state.py) admits one request, and the next one when that one has computed its tokens.

Cost of a steady step: a dozen array operations over the rows, nothing proportional to history.
"""

from __future__ import annotations

from vnext.sched.admission import admissions, in_flight_max
from vnext.sched.preemption import make_room
from vnext.state.events import StepPlanned
from vnext.state.expected import expected_work
from vnext.state.state import State


def schedule(state: State) -> StepPlanned | None:
    """The next step's plan, or None if the engine is paused, the pipeline is full or there is nothing to compute."""
    if state.paused not in ("", "wait") or len(state.in_flight) >= in_flight_max(state):
        return None
    work = expected_work(state)
    if work.pages_sum > state.pool.free:
        return make_room(state)
    admitted = admissions(state, work)
    if work.tokens_sum == 0 and not admitted:
        return None
    return StepPlanned(step=state.planned, admitted=admitted)
