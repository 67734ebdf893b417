"""verify: fold the log again and compare every decision, every digest and every law with what was recorded.

Owns the comparison and its verdict: the first difference, named by step, event number and field. What follows a first
difference says nothing new, so verification stops there.
"""

from __future__ import annotations

from collections import deque

import msgspec

from vnext.replay.folding import Broken, Folded, FrameFolded, Planning, fold
from vnext.replay.source import Log
from vnext.sched.schedule import schedule
from vnext.state import log as logs
from vnext.state.digest import digest
from vnext.state.errors import LawBroken
from vnext.state.events import StepPlanned
from vnext.state.laws import check, check_cheap
from vnext.state.log import LogEnd, RankDigest, SegmentStart
from vnext.state.state import State

STATES_KEPT = 256
"""Steps for which a rank's late digest can still be compared; states share what did not change."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that is not as recorded. `step` is the last one planned by then, -1 before the first."""

    step: int
    event: int
    field: str
    recorded: str
    recomputed: str
    message: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and the outcome. `digests` are chained digests of frames, `rank_digests` those of ranks."""

    same: bool
    events: int
    steps: int
    digests: int
    rank_digests: int
    rank_digests_unchecked: int
    laws: str
    difference: Difference | None
    end: LogEnd | None


def verify(log: Log, all_laws: bool = False) -> Verdict:
    """Replay the log. A torn tail is a shorter log; damage, a gap or any difference makes `same` false."""
    check_log = _Checks(log, all_laws)
    for item in fold(log):
        match item:
            case Planning():
                check_log.plan(item)
            case Folded():
                check_log.folded(item)
            case FrameFolded():
                check_log.frame(item)
            case SegmentStart():
                check_log.chain = item.chain
            case Broken():
                check_log.broken(item)
            case LogEnd():
                check_log.end = item
        if check_log.difference is not None:
            break
    return check_log.verdict()


class _Checks:
    """The running comparison."""

    def __init__(self, log: Log, all_laws: bool) -> None:
        self.chain = log.chain
        self.end: LogEnd | None = None
        self.difference: Difference | None = None
        self._law = check if all_laws else check_cheap
        self._laws = "all" if all_laws else "cheap"
        self._states: deque[tuple[int, State]] = deque(maxlen=STATES_KEPT)
        self._events = self._steps = self._digests = self._rank_digests = self._unchecked = 0

    def plan(self, item: Planning) -> None:
        """Decide the step anew in the recorded state."""
        decided = schedule(item.before)
        if decided == item.event:
            return
        field, recorded, recomputed = plan_difference(item.event, decided)
        self._differ(item.event.step, item.number, field, recorded, recomputed, "the scheduler decides otherwise now")

    def folded(self, item: Folded) -> None:
        self._events += 1
        if isinstance(item.event, StepPlanned):
            self._steps += 1
            self._states.append((item.event.step, item.after))
        try:
            self._law(item.after)
        except LawBroken as error:
            self._differ(item.after.planned - 1, item.number, f"law {error.law}", "", "", str(error))

    def frame(self, item: FrameFolded) -> None:
        """Recompute the chained digest and the digests that ranks reported."""
        self._digests += 1
        number, step = item.state.sequence - 1, item.state.planned - 1
        self.chain = logs.chained(self.chain, digest(item.state), item.frame.body)
        if self.chain != item.frame.digest:
            why = "the state after this event, or the frame's bytes, are not what the engine had"
            self._differ(step, number, "chained digest", hexadecimal(item.frame.digest), hexadecimal(self.chain), why)
        for report in item.frame.rank_digests:
            self._rank(report, number)

    def _rank(self, report: RankDigest, number: int) -> None:
        state = next((state for step, state in reversed(self._states) if step == report.step), None)
        if state is None:
            self._unchecked += 1
            return
        self._rank_digests += 1
        due = digest(state)
        if due != report.digest:
            why = f"rank {report.rank} had another state in step {report.step}"
            field = f"digest of rank {report.rank}"
            self._differ(report.step, number, field, hexadecimal(report.digest), hexadecimal(due), why)

    def broken(self, item: Broken) -> None:
        self._differ(item.state.planned - 1, item.number, item.field, "", "", item.message)

    def _differ(self, step: int, event: int, field: str, recorded: str, recomputed: str, message: str) -> None:
        """Only the first difference counts."""
        self.difference = self.difference or Difference(
            step=step, event=event, field=field, recorded=recorded, recomputed=recomputed, message=message
        )

    def verdict(self) -> Verdict:
        return Verdict(
            same=self.difference is None and self.end is not None and self.end.kind in ("complete", "torn"),
            events=self._events,
            steps=self._steps,
            digests=self._digests,
            rank_digests=self._rank_digests,
            rank_digests_unchecked=self._unchecked,
            laws=self._laws,
            difference=self.difference,
            end=self.end,
        )


def plan_difference(recorded: StepPlanned, decided: StepPlanned | None) -> tuple[str, str, str]:
    """Field, recorded and recomputed value of the first field in which two plans differ."""
    if decided is None:
        return "plan", str(recorded), "nothing to plan"
    for field in StepPlanned.__struct_fields__:
        one, other = getattr(recorded, field), getattr(decided, field)
        if one != other:
            return f"plan.{field}", str(one), str(other)
    return "plan", str(recorded), str(decided)


def hexadecimal(value: int) -> str:
    return f"{value:016x}"
