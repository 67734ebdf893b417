"""Shortages of memory in a simulation: which steps no rank can compute, and when memory suffices again."""

from __future__ import annotations

from tests.sim.scenario import Faults
from vnext.sched.shortage import raised
from vnext.sim.rank_values import is_short_in
from vnext.sim.rng import Rng
from vnext.state.events import AnyEvent, plan_of
from vnext.state.state import State

RELIEF_PERCENT = 10


class Shortages:
    """Those of one simulation. Mutable; `short` are the steps of its engine that lack memory, which all ranks know."""

    def __init__(self, faults: Faults, rng: Rng, short: set[int]) -> None:
        """None yet. `short` belongs to the ranks too."""
        self._faults, self._rng, self.short = faults, rng, short
        self.count = 0

    def strike(self, event: AnyEvent, state: State) -> None:
        """Memory may lack for a step that is planned, and does where an earlier one lacks it."""
        if plan_of(event) is None:
            return
        behind = is_short_in(state, self.short)
        if behind or (self.count < self._faults.shortages and self._rng.happens(self._faults.short)):
            self.short.add(state.in_flight[-1].step)
            self.count += not behind

    def relief(self, state: State) -> tuple[AnyEvent, ...]:
        """Now and then, memory suffices again."""
        return (raised(state),) if state.lowered_from and self._rng.happens(RELIEF_PERCENT) else ()
