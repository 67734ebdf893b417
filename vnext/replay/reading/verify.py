"""verify: folds the log again and compares every decision, digest and law with the record.

Owns the comparison and its verdict: the first difference, named by step, event number and field. Verification stops at
the first difference, because what follows it adds nothing. Decisions are the exception: where the scheduler decides
differently now, the recorded plan is folded, and all differing decisions are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from vnext.log import codec
from vnext.log.codec import LogEnd, RankDetail, RankDigest
from vnext.log.snapshot import BadSnapshot, decode, snapshot
from vnext.replay.reading.continued import Continued
from vnext.replay.reading.folding import Broken, Fold, Folded, FrameFolded, Planning, SegmentFolded, first_state, fold
from vnext.replay.reading.handed_over import HandedOver
from vnext.replay.reading.source import Log
from vnext.sched.policies import PolicyError, is_built_in, policy_of
from vnext.sched.residency import next_load
from vnext.sched.schedule import schedule
from vnext.state.digest import DETAIL_NAMES, DIGEST_VERSION, details, digest, hexadecimal
from vnext.state.errors import LawBroken
from vnext.state.events import AdapterEvicted, AdapterLoaded, AnyEvent, StepPlanned
from vnext.state.laws import check, check_cheap
from vnext.state.state import State

DIGESTS_KEPT = 1 << 12
"""Steps for which a rank's late digest can still be compared."""
DECISIONS_SHOWN = 16
STATES_KEPT = 4


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference from the record. `step` is the last one planned by then, -1 before the first."""

    step: int
    event: int
    field: str
    recorded: str
    recomputed: str
    message: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True, rename={"snapshots": "keyframes"}):
    """What was compared, and the outcome. `digests` are chained digests of frames, `rank_digests` those of ranks.

    `first_event` is the first that was compared: 1, or more where older segments are missing. `snapshots` are those of
    the segments after the first. `plans_unchecked` says why no plan was decided again, "" if all were: an engine's own
    policy may be unavailable here. `decisions_differ` counts the plans that the scheduler would not make today;
    `decisions` are the first of them. `digests_unchecked` says why no digest and no snapshot was compared, "" if all
    were: the log may have another version of digests. `constrained_tokens` were held to the constraints of
    `constrained_requests`; -1 where that was not asked for.
    """

    same: bool
    written_by: str
    first_event: int
    events: int
    steps: int
    plans_unchecked: str
    decisions_differ: int
    decisions: list[Difference]
    digests_unchecked: str
    digests: int
    rank_digests: int
    rank_digests_unchecked: int
    snapshots: int
    laws: str
    difference: Difference | None
    end: LogEnd | None
    constrained_requests: int = 0
    constrained_tokens: int = -1
    continued: Continued | None = None
    handed_over: HandedOver | None = None


class EventCheck(Protocol):
    """A further check of every event."""

    def begin(self, state: State) -> None:
        """Take in the state in which the log begins."""

    def __call__(self, before: State, event: AnyEvent, after: State) -> str:
        """What is wrong with an event, in one sentence; "" for nothing."""


def verify(log: Log, all_laws: bool = False, own_policy: bool = False, also: EventCheck | None = None) -> Verdict:
    """Replay the log. A torn tail is a shorter log; damage, a gap or any difference makes `same` false.

    Cheap laws are checked once per frame; with `all_laws`, all laws are checked after every event. With `own_policy` a
    policy that is not built in is imported by the name in the log, which runs its module's code. `also` checks every
    event besides.
    """
    check_log = _Checks(log, all_laws, own_policy, also)
    if also is not None:
        also.begin(first_state(log))
    for item in fold(log):
        check_log.meet(item)
        if check_log.difference is not None:
            break
    return check_log.verdict()


COUNTED = ("events", "steps", "decisions_differ", "digests", "rank_digests", "rank_digests_unchecked", "snapshots")
"""The numbers of a verdict that count up from 0."""


class _Checks:
    """The running comparison."""

    def __init__(self, log: Log, all_laws: bool, own_policy: bool, also: EventCheck | None) -> None:
        self.chain = log.chain
        self._also = also
        self.decisions: list[Difference] = []
        self.end: LogEnd | None = None
        self.difference: Difference | None = None
        self._all_laws = all_laws
        self._first = log.header
        self._plans_unchecked = why_not_decided(log, own_policy)
        self._digests_unchecked = why_not_digested(log)
        self._reported: dict[int, State] = {}
        self._equal_steps: dict[int, int] = {}
        self._step_digests: dict[int, int] = {}
        self._digested: State | None = None
        self._digest = 0
        self._counts = dict.fromkeys(COUNTED, 0)

    def meet(self, item: Fold) -> None:
        match item:
            case Planning():
                self.plan(item)
            case Folded():
                self.folded(item)
            case FrameFolded():
                self.frame(item)
            case SegmentFolded():
                self.segment(item)
            case Broken():
                self.broken(item)
            case LogEnd():
                self.ended(item)

    def segment(self, item: SegmentFolded) -> None:
        """Check that a segment's snapshot is the state that the segments before it lead to."""
        header = item.start.header
        self.chain = item.start.chain
        if not header.snapshot or header.index == self._first.index or self._digests_unchecked:
            return
        try:
            recorded = decode(header.snapshot)
        except BadSnapshot as error:
            self._differ(item.state.planned - 1, item.state.sequence, "snapshot", "", "", str(error))
            return
        if recorded.sequence != item.state.sequence:
            return  # frames are missing before it; the next one reports that
        self._counts["snapshots"] += 1
        due = snapshot(item.state)
        if header.privacy == "shape":  # it starts a new chain of tokens
            due = msgspec.structs.replace(due, token_digest=0)
        for field in [name for name in due.__struct_fields__ if getattr(due, name) != getattr(recorded, name)][:1]:
            why = f"the snapshot of segment {header.index} is not the state that was reached"
            self._differ(item.state.planned - 1, item.state.sequence, f"snapshot.{field}", "", "", why)

    def plan(self, item: Planning) -> None:
        """Decide the step again in the recorded state."""
        if self._plans_unchecked:
            return
        try:
            difference = plan_difference(item.before, item.event)
        except PolicyError as error:
            self._differ(item.event.step, item.number, "plan", str(item.event), "none", str(error))
            return
        if difference is not None:
            self._decides_differently(item.event.step, item.number, difference)

    def _decides_differently(self, step: int, number: int, difference: tuple[str, str, str]) -> None:
        self._counts["decisions_differ"] += 1
        if len(self.decisions) < DECISIONS_SHOWN:
            field, recorded, recomputed = difference
            why = "the scheduler decides differently now"
            self.decisions.append(
                Difference(step=step, event=number, field=field, recorded=recorded, recomputed=recomputed, message=why)
            )

    def folded(self, item: Folded) -> None:
        self._counts["events"] += 1
        if self._also is not None and (why := self._also(item.before, item.event, item.after)):
            self._differ(item.after.planned - 1, item.number, "tokens", "", "", why)
        if isinstance(item.event, AdapterLoaded | AdapterEvicted) and not self._plans_unchecked:
            if difference := load_difference(item.before, item.event):
                self._decides_differently(item.before.planned - 1, item.number, difference)
        if isinstance(item.event, StepPlanned):
            self._counts["steps"] += 1
            if not self._digests_unchecked:
                self._step_digests[item.event.step] = self._digest_of(item.after)
                self._step_digests.pop(item.event.step - DIGESTS_KEPT, None)
                self._keep_reported(item.event.step, item.after)
        if self._all_laws:
            self._require(check, item.after)

    def _keep_reported(self, step: int, state: State) -> None:
        """Keep the last states for which ranks report digests, to name the fields in which a rank differs."""
        if step % max(1, state.config.digest_interval) == 0:
            self._reported[step] = state
            if len(self._reported) > STATES_KEPT:
                del self._reported[min(self._reported)]

    def _require(self, laws: Callable[[State], None], state: State) -> None:
        try:
            laws(state)
        except LawBroken as error:
            self._differ(state.planned - 1, state.sequence - 1, f"law {error.law}", "", "", str(error))

    def _digest_of(self, state: State) -> int:
        """The digest for a step. A frame usually ends with a plan, and then the step's digest is the frame's."""
        if state is not self._digested:
            self._digested, self._digest = state, digest(state)
        return self._digest

    def frame(self, item: FrameFolded) -> None:
        """Recompute the chained digest and compare the digests that ranks reported."""
        number, step = item.state.sequence - 1, item.state.planned - 1
        if not self._all_laws:
            self._require(check_cheap, item.state)
        if self._digests_unchecked:
            self._counts["rank_digests_unchecked"] += len(item.frame.rank_digests)
            return
        self._counts["digests"] += 1
        self.chain = codec.chained(self.chain, self._digest_of(item.state), item.frame.body)
        if self.chain != item.frame.digest:
            why = "the state after this event, or the frame's bytes, are not what the engine had"
            self._differ(step, number, "chained digest", hexadecimal(item.frame.digest), hexadecimal(self.chain), why)
        for report in item.frame.rank_digests:
            self._rank(report, number, item.frame.details)

    def _rank(self, report: RankDigest, number: int, reported: tuple[RankDetail, ...]) -> None:
        due = self._step_digests.get(report.step)
        if due is None:
            self._counts["rank_digests_unchecked"] += 1
            return
        self._counts["rank_digests"] += 1
        if due != report.digest:
            fields = drifted_fields(reported, report, self._reported.get(report.step))
            why = f"rank {report.rank} had another state in step {report.step}" + (f": {', '.join(fields)}" if fields else "")
            field = f"digest of rank {report.rank}"
            self._differ(report.step, number, field, hexadecimal(report.digest), hexadecimal(due), why)
        elif detail := next(iter(reported_by(report, reported)), None):
            self._tokens(detail, number)
        else:
            self._equal_steps[report.rank] = report.step

    def _tokens(self, reported: RankDetail, number: int) -> None:
        """Handle a rank that reported details although its digest is right: digests cover structure, so its tokens
        differ."""
        since = self._equal_steps.get(reported.rank)
        if reported.fed:
            where = f"rank {reported.rank} gave the model inputs that differ from its state in step {reported.step}"
            why = f"{where}: {', '.join(reported.fed)}"
            self._differ(reported.step, number, f"batch of rank {reported.rank}", "", "", why)
            return
        why = f"rank {reported.rank} sampled a different token than the engine before step {reported.step}"
        why += f", for request {', '.join(map(str, reported.requests))}" if reported.requests else ""
        why += f"; it agreed up to step {since}" if since is not None else ""
        state = self._reported.get(reported.step)
        due = hexadecimal(state.token_digest) if state is not None and self._first.privacy == "full" else ""
        self._differ(
            reported.step,
            number,
            f"tokens of rank {reported.rank}",
            hexadecimal(reported.token_digest) if due else "",
            due,
            why,
        )

    def ended(self, item: LogEnd) -> None:
        self.end = item

    def broken(self, item: Broken) -> None:
        self._differ(item.state.planned - 1, item.number, item.field, "", "", item.message)

    def _differ(self, step: int, event: int, field: str, recorded: str, recomputed: str, message: str) -> None:
        """Record a difference; only the first counts."""
        self.difference = self.difference or Difference(
            step=step, event=event, field=field, recorded=recorded, recomputed=recomputed, message=message
        )

    def verdict(self) -> Verdict:
        difference, counts = self.difference or next(iter(self.decisions), None), self._counts
        return Verdict(
            same=difference is None and self.end is not None and self.end.kind in ("complete", "torn"),
            written_by=self._first.code_version,
            first_event=self._first.first_event,
            plans_unchecked=self._plans_unchecked,
            decisions=self.decisions,
            digests_unchecked=self._digests_unchecked,
            events=counts["events"],
            steps=counts["steps"],
            decisions_differ=counts["decisions_differ"],
            digests=counts["digests"],
            rank_digests=counts["rank_digests"],
            rank_digests_unchecked=counts["rank_digests_unchecked"],
            snapshots=counts["snapshots"],
            laws="all" if self._all_laws else "cheap",
            difference=difference,
            end=self.end,
        )


def why_not_digested(log: Log) -> str:
    """Why this log's digests cannot be compared here, "" if they can."""
    written = log.header.digest_version
    if written == DIGEST_VERSION:
        return ""
    ours = f"this code computes version {DIGEST_VERSION}: states fold, digests not compared"
    return f"written with digest version {written}; {ours}"


def why_not_decided(log: Log, own_policy: bool = False) -> str:
    """Why this log's plans cannot be decided again here, "" if they can. Imports nothing unless `own_policy`."""
    name = log.header.started.config.policy
    if not is_built_in(name) and not own_policy:
        return f"the log names the policy {name}, and a log is no reason to run code: give --own-policy to import it"
    try:
        policy_of(name)
    except PolicyError as error:
        return str(error)
    return ""


def reported_by(report: RankDigest, reported: tuple[RankDetail, ...]) -> list[RankDetail]:
    """The details that belong to a report."""
    return [each for each in reported if (each.rank, each.step) == (report.rank, report.step)]


def drifted_fields(reported: tuple[RankDetail, ...], report: RankDigest, state: State | None) -> list[str]:
    """Names of the fields in which the rank differs from `state`, in which the step ran; empty if it reported no
    details."""
    found = reported_by(report, reported)
    if not found or state is None:
        return []
    return [name for name, one, other in zip(DETAIL_NAMES, found[0].words, details(state)) if one != other]


def load_difference(before: State, event: AdapterLoaded | AdapterEvicted) -> tuple[str, str, str] | None:
    """As `plan_difference`, of a slot whose adapter changes; None where the scheduler decides so too."""
    load = next_load(before)
    decided = load.events("")[0] if load is not None else None
    recorded, recomputed = _change(event), "none" if decided is None else _change(decided)
    return None if recorded == recomputed else ("adapter", recorded, recomputed)


def _change(event: AdapterLoaded | AdapterEvicted) -> str:
    return f"{event.digest} into slot {event.slot}" if isinstance(event, AdapterLoaded) else f"slot {event.slot} is evicted"


def plan_difference(before: State, recorded: StepPlanned) -> tuple[str, str, str] | None:
    """Field, recorded value and recomputed value of the first field in which a plan differs from what the scheduler decides; None
    where it decides so too. Raises PolicyError."""
    decided = schedule(before)
    if decided == recorded:
        return None
    if decided is None:
        return "plan", str(recorded), "nothing to plan"
    for field in StepPlanned.__struct_fields__:
        one, other = getattr(recorded, field), getattr(decided, field)
        if one != other:
            return f"plan.{field}", str(one), str(other)
    return "plan", str(recorded), str(decided)
