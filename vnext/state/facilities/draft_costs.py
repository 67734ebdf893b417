"""Draft costs: what drafts cost a step, where an engine has measured it again while it serves.

How many drafts a step takes follows from the costs (vnext/state/drafting.py), so a change of them is an event, and a log decides
as its engine did. The costs are those of the state's configuration. How they are measured is the engine core's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vnext.state.config import Speculation
from vnext.state.errors import require
from vnext.state.events import AnyEvent, DraftCostsMeasured
from vnext.state.state import State
from vnext.state.store.fields import FEW_ROWS

replace = msgspec.structs.replace
COST_MAX = 1000
ROWS_FEW = FEW_ROWS
"""Up to so many rows in a step the first of the costs counts, beyond them that of many."""


def costs_of(speculation: Speculation) -> tuple[int, int, int]:
    return speculation.row_cost, speculation.step_cost, speculation.row_cost_many


def with_costs(speculation: Speculation, costs: tuple[int, int, int]) -> Speculation:
    """The speculation with other costs, each from 0 to COST_MAX thousandths of a step of one token. Raises IllegalEvent."""
    require(all(0 <= cost <= COST_MAX for cost in costs), f"drafts cost {costs}, not from 0 to {COST_MAX} thousandths of a step")
    row, step, many = costs
    return replace(speculation, row_cost=row, step_cost=step, row_cost_many=many)


def fold_draft_costs(state: State, event: DraftCostsMeasured) -> State:
    """The state that decides by other costs."""
    speculation, costs = state.config.speculation, (event.row_cost, event.step_cost, event.row_cost_many)
    require(speculation is not None, "an engine without drafts has measured what they cost")
    assert speculation is not None
    require(costs != costs_of(speculation), f"drafts cost {costs}, as before: a measurement says something new")
    return replace(state, config=replace(state.config, speculation=with_costs(speculation, costs)))


def illegal(state: State) -> Iterator[AnyEvent]:
    """No engine without drafts measures them, nothing is measured twice alike, and no cost is negative or above a step's."""
    if state.config.speculation is None:
        yield DraftCostsMeasured(row_cost=1, step_cost=0, row_cost_many=1)
        return
    row, step, many = costs_of(state.config.speculation)
    yield DraftCostsMeasured(row_cost=row, step_cost=step, row_cost_many=many)
    yield DraftCostsMeasured(row_cost=-1, step_cost=step, row_cost_many=many)
    yield DraftCostsMeasured(row_cost=row, step_cost=COST_MAX + 1, row_cost_many=many)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {DraftCostsMeasured: fold_draft_costs}
