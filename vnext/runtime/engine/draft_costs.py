"""Draft costs of an engine core: from the times of the steps that it serves, what drafts cost them.

A rank measures the costs at the start (vnext/runtime/rank/draft_costs.py), maybe while the machine is busy. The shortest steps of
each size say it again, for drafters that read texts: what disturbs a step is not its cost. Reads no clock.
"""

from __future__ import annotations

from vnext.runtime.engine.facility import Facility
from vnext.state.config import Speculation
from vnext.state.events import DraftCostsMeasured, StepCommitted
from vnext.state.facilities.draft_costs import COST_MAX, ROWS_FEW, costs_of
from vnext.state.state import State, StepInFlight

INTERVAL, SEEN_MIN, SPAN_MIN = 256, 4, 3
GROWTH = 1.001
"""Of the shortest time of a size, with each of its steps: a machine that has become slower is noticed within some hundred."""
MARGIN = 9 / 8
"""As that of the start, for steps of many rows."""
CHANGE_MIN = 25


class DraftCosts(Facility):
    """The steps of one engine. Mutable."""

    def __init__(self) -> None:
        self._shortest_s: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._count = 0

    def took(self, step: StepInFlight, commit: StepCommitted, seconds: float) -> None:
        """A step has ended; one that computes prompts says nothing."""
        rows, drafted = len(step.ids), sum(commit.drafted)
        if step.drafts is None or step.tokens != rows + int(step.drafts.sum()):
            return
        size = drafted, rows
        self._shortest_s[size] = min(seconds, self._shortest_s.get(size, seconds) * GROWTH)
        self._seen[size] = self._seen.get(size, 0) + 1
        self._count += 1

    @property
    def is_on(self) -> bool:  # type: ignore[override]
        return self._count >= INTERVAL

    def next_event(self, state: State) -> DraftCostsMeasured | None:
        """The costs, where they are others than those by which the state decides."""
        self._count, speculation = 0, state.config.speculation
        assert speculation is not None
        before, now = costs_of(speculation), self.measured(speculation)
        if all(abs(new - old) <= max(CHANGE_MIN, old // 4) for new, old in zip(now, before)):
            return None
        row, step, many = now
        return DraftCostsMeasured(row_cost=row, step_cost=step, row_cost_many=many)

    def measured(self, speculation: Speculation) -> tuple[int, int, int]:
        """The costs of a row, of drafting at all and of a row beside many; as they were where too few sizes have been seen."""
        row, step, many = costs_of(speculation)
        times = {size: seconds for size, seconds in self._shortest_s.items() if self._seen[size] >= SEEN_MIN}
        plain = {rows: seconds for (drafted, rows), seconds in times.items() if not drafted}
        least, most = (pick((rows for rows in plain if rows <= ROWS_FEW), default=0) for pick in (min, max))
        if most - least < SPAN_MIN:
            return row, step, many
        row_s = max((plain[most] - plain[least]) / (most - least), 0.0)
        alone_s = plain[least] - (least - 1) * row_s
        extra_s = [
            seconds - alone_s - (rows + drafted - 1) * row_s for (drafted, rows), seconds in times.items()
            if drafted and rows + drafted <= ROWS_FEW
        ]  # fmt: skip
        if alone_s <= 0:
            return row, step, many
        if (largest := max(plain)) - ROWS_FEW >= SPAN_MIN:
            many = _thousandths(MARGIN * (plain[largest] - plain[most]) / (largest - most) / alone_s)
        return _thousandths(row_s / alone_s), _thousandths(min(extra_s) / alone_s) if extra_s else step, many


def _thousandths(share: float) -> int:
    return min(max(round(1000 * share), 0), COST_MAX)
