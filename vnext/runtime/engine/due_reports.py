"""Due reports: what every rank reports of a step whose digest is due, and which ranks had another state, other tokens or fed the
model something else than the state says.

Owns the reports until all have arrived. By then rank 0 has reported the samples of earlier steps, which this step may take in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vnext.log.codec import RankDetail, RankDigest
from vnext.runtime.batch import fed
from vnext.runtime.protocol.messages import StepResult
from vnext.state.digest import requests_otherwise
from vnext.state.errors import LawBroken
from vnext.state.events import StepCommitted
from vnext.state.state import State


class Drifted(LawBroken):
    """A rank's state, tokens or inputs are not the engine's (law Y1)."""


class Reported(NamedTuple):
    """What the next frame of the log holds of ranks."""

    digests: list[RankDigest]
    details: list[RankDetail]


NOTHING_REPORTED = Reported([], [])


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


class RankChecks:
    """The steps of one engine whose digests are due. Mutable. `count`: reports that were compared. `new` go into the next frame."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.due: dict[int, DueReports] = {}
        self.new = Reported([], [])
        self.count = 0

    def expect(self, step: int, structure: int, state: State) -> None:
        """A step was planned whose digests are due: those of the state in which it runs."""
        self.due[step] = DueReports(structure, state)

    def compare(self, result: StepResult) -> None:
        """Take a rank's report of such a step. Raises Drifted, after noting where the rank differs."""
        due = self.due[result.step]
        self.new.digests.append(RankDigest(result.rank, result.step, result.digest))
        if (result.digest, result.token_digest) != (due.structure, due.state.token_digest):
            raise self._drifted(result, due.state, "state" if result.digest != due.structure else "token")
        self.count += 1
        due.reports.append(result)
        if len(due.reports) == self._world_size:
            del self.due[result.step]
            for report, names in due.fed_otherwise():
                raise self._drifted(report, due.state, "batch", names)

    def lose_steps(self, first: int) -> None:
        """No rank reports of the steps from `first` on."""
        for step in [step for step in self.due if step >= first]:
            del self.due[step]

    def take_new(self) -> Reported:
        """What has been reported since the last call."""
        new, self.new = self.new, Reported([], [])
        return new

    def _drifted(self, result: StepResult, state: State, what: str, names: tuple[str, ...] = ()) -> Drifted:
        requests = requests_otherwise(state, result.histories) if what == "token" else ()
        reported = RankDetail(result.rank, result.step, result.details, result.token_digest, requests, names)
        self.new.details.append(reported)
        whose = f" (requests {', '.join(map(str, requests))})" if requests else f" ({', '.join(names)})" if names else ""
        return Drifted("Y1", f"rank {result.rank} has drifted: its {what} digest differs at step {result.step}{whose}")
