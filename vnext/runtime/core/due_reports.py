"""Due reports: every rank's report of one step, and which ranks fed the model something else than the state says.

Owns the reports until all have arrived. By then rank 0 has reported the samples of earlier steps, which this step may take in.
"""

from __future__ import annotations

from collections.abc import Iterator

from vnext.runtime.batch import fed
from vnext.runtime.messages import StepResult
from vnext.state.events import StepCommitted
from vnext.state.state import State


class DueReports:
    """The reports of one step. Mutable. `structure` is the digest of `state`, in which the step runs; `commits` holds what
    rank 0 has sampled since then, by step."""

    __slots__ = ("structure", "state", "reports", "commits")

    def __init__(self, structure: int, state: State) -> None:
        self.structure, self.state = structure, state
        self.reports: list[StepResult] = []
        self.commits: dict[int, StepCommitted] = {}

    def fed_otherwise(self) -> Iterator[tuple[StepResult, tuple[str, ...]]]:
        """(report, names of the inputs that differ) for each rank whose batch does not match the state."""
        reported = [report for report in self.reports if report.fed]
        if not reported:
            return
        first = min(reported, key=lambda report: report.rank)
        words = (*fed.due(self.state, self.commits, first.drafts, first.drafted), first.fed[-1])
        for report in reported:
            if names := fed.otherwise(report.fed, words):
                yield report, names
