"""show: the state at a step, as plain values.

The state of step t is the state in which the step runs: right after its plan was folded.
"""

from __future__ import annotations

import msgspec

from vnext.replay.reading.folding import Broken, Folded, fold_items
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog
from vnext.replay.reading.state_view import view
from vnext.state.digest import digest, hexadecimal
from vnext.state.events import StepPlanned
from vnext.state.state import State


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """`event` is the number of the last folded event; `plan` is the step's plan, None at the end of the log."""

    step: int
    event: int
    digest: str
    plan: StepPlanned | None
    state: dict


def show(index: Index, step: int | None) -> Shown:
    """The state at `step`, or at the log's end. Raises UnusableLog if the log has no such step."""
    state, plan = state_at(index, step)
    return Shown(
        step=state.planned - 1,
        event=state.sequence - 1,
        digest=hexadecimal(digest(state)),
        plan=plan,
        state=view(state),
    )


def state_at(index: Index, step: int | None) -> tuple[State, StepPlanned | None]:
    """The state in which `step` runs and its plan; for no step, the last state and None. Raises UnusableLog if there is
    none."""
    first_step = index.first.planned
    if step is not None and step < first_step:
        raise UnusableLog(f"step {step} is not in this log: it has {_steps(first_step, index.last.planned)}")
    place = index.at_end() if step is None else index.at_step(step)
    state, broken = place.state, ""
    for item in fold_items(place.state, place.items):
        if isinstance(item, Folded):
            state = item.after
            if isinstance(item.event, StepPlanned) and item.event.step == step:
                return state, item.event
        elif isinstance(item, Broken):
            broken = f" ({item.message})"
    if step is not None:
        raise UnusableLog(f"step {step} is not in this log: it has {_steps(first_step, state.planned)}{broken}")
    return state, None


def _steps(first: int, planned: int) -> str:
    older = ", the older ones are not here" if first else ""
    return f"steps {first} to {planned - 1}{older}" if planned > first else "no step"
