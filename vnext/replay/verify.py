"""verify: fold the log again and compare every decision, every digest and every law with what was recorded.

Owns the comparison and its verdict: the first difference, named by step, event number and field. What follows a first
difference says nothing new, so verification stops there. But for decisions: where the scheduler decides otherwise now,
the recorded plan is folded, and all decisions that would differ are counted.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vnext.replay.folding import Broken, Folded, FrameFolded, Planning, SegmentFolded, fold
from vnext.replay.source import Log
from vnext.sched.policies import BUILT_IN, PolicyError, policy_of
from vnext.sched.schedule import schedule
from vnext.state import log as logs
from vnext.state.digest import DETAIL_NAMES, DIGEST_VERSION, details, digest, hexadecimal
from vnext.state.errors import LawBroken
from vnext.state.events import StepPlanned
from vnext.state.keyframe import BadKeyframe, decode, keyframe
from vnext.state.laws import check, check_cheap
from vnext.state.log import LogEnd, RankDetail, RankDigest
from vnext.state.state import State

DIGESTS_KEPT = 1 << 12
"""Steps for which a rank's late digest can still be compared."""
DECISIONS_SHOWN = 16
STATES_KEPT = 4


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that is not as recorded. `step` is the last one planned by then, -1 before the first."""

    step: int
    event: int
    field: str
    recorded: str
    recomputed: str
    message: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and the outcome. `digests` are chained digests of frames, `rank_digests` those of ranks.

    `first_event` is the first that was compared: 1, or more where older segments are not here. `keyframes` are those
    of the segments after the first.
    `plans_unchecked` says why no plan was decided again, "" if all were: a policy of the engine's own may not be here.
    `decisions_differ` counts plans that the scheduler would not make today, `decisions` are the first of them.
    `digests_unchecked` says why no digest and no keyframe was compared, "" if all were: another version of digests.
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
    keyframes: int
    laws: str
    difference: Difference | None
    end: LogEnd | None


def verify(log: Log, all_laws: bool = False, own_policy: bool = False) -> Verdict:
    """Replay the log. A torn tail is a shorter log; damage, a gap or any difference makes `same` false.

    Cheap laws are checked once a frame, all laws after every event. With `own_policy` a policy that is not built in is
    imported by the name that the log has for it: that runs its module's code.
    """
    check_log = _Checks(log, all_laws, own_policy)
    meet = {
        Planning: check_log.plan, Folded: check_log.folded, FrameFolded: check_log.frame,
        SegmentFolded: check_log.segment, Broken: check_log.broken, LogEnd: check_log.ended,
    }  # fmt: skip
    for item in fold(log):
        meet[type(item)](item)
        if check_log.difference is not None:
            break
    return check_log.verdict()


class _Checks:
    """The running comparison."""

    def __init__(self, log: Log, all_laws: bool, own_policy: bool) -> None:
        self.chain = log.chain
        self.decisions: list[Difference] = []
        self.end: LogEnd | None = None
        self.difference: Difference | None = None
        self._all_laws = all_laws
        self._first_event, self._first_index = log.header.first_event, log.header.index
        self._written_by = log.header.code_version
        self._plans_unchecked = why_not_decided(log, own_policy)
        self._digests_unchecked = why_not_digested(log)
        self._reported: dict[int, State] = {}
        self._equal_steps: dict[int, int] = {}
        self._has_texts = log.header.privacy == "full"
        self._decisions_differ = 0
        self._step_digests: dict[int, int] = {}
        self._digested: State | None = None
        self._digest = 0
        self._events = self._steps = self._digests = self._rank_digests = self._unchecked = self._keyframes = 0

    def segment(self, item: SegmentFolded) -> None:
        """A segment's keyframe is the state that the segments before it lead to."""
        header = item.start.header
        self.chain = item.start.chain
        if not header.keyframe or header.index == self._first_index or self._digests_unchecked:
            return
        try:
            recorded = decode(header.keyframe)
        except BadKeyframe as error:
            self._differ(item.state.planned - 1, item.state.sequence, "keyframe", "", "", str(error))
            return
        if recorded.sequence != item.state.sequence:
            return  # frames are missing before it, and the next one says so
        self._keyframes += 1
        due = keyframe(item.state)
        if header.privacy == "shape":  # it chains its tokens anew
            due = msgspec.structs.replace(due, token_digest=0)
        for field in [name for name in due.__struct_fields__ if getattr(due, name) != getattr(recorded, name)][:1]:
            why = f"the keyframe of segment {header.index} is not the state that was reached"
            self._differ(item.state.planned - 1, item.state.sequence, f"keyframe.{field}", "", "", why)

    def plan(self, item: Planning) -> None:
        """Decide the step anew in the recorded state."""
        if self._plans_unchecked:
            return
        try:
            decided = schedule(item.before)
        except PolicyError as error:
            self._differ(item.event.step, item.number, "plan", str(item.event), "none", str(error))
            return
        if decided == item.event:
            return
        self._decisions_differ += 1
        if len(self.decisions) < DECISIONS_SHOWN:
            field, recorded, recomputed = plan_difference(item.event, decided)
            self.decisions.append(
                Difference(
                    step=item.event.step, event=item.number, field=field, recorded=recorded, recomputed=recomputed,
                    message="the scheduler decides otherwise now",
                )
            )  # fmt: skip

    def folded(self, item: Folded) -> None:
        self._events += 1
        if isinstance(item.event, StepPlanned):
            self._steps += 1
            if not self._digests_unchecked:
                self._step_digests[item.event.step] = self._digest_of(item.after)
                self._step_digests.pop(item.event.step - DIGESTS_KEPT, None)
                self._keep_reported(item.event.step, item.after)
        if self._all_laws:
            self._require(check, item.after)

    def _keep_reported(self, step: int, state: State) -> None:
        """The last states of which ranks report digests: to name what a rank has otherwise."""
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
        """A frame ends with a plan as a rule: the step's digest is the frame's then."""
        if state is not self._digested:
            self._digested, self._digest = state, digest(state)
        return self._digest

    def frame(self, item: FrameFolded) -> None:
        """Recompute the chained digest and compare the digests that ranks reported."""
        number, step = item.state.sequence - 1, item.state.planned - 1
        if not self._all_laws:
            self._require(check_cheap, item.state)
        if self._digests_unchecked:
            self._unchecked += len(item.frame.rank_digests)
            return
        self._digests += 1
        self.chain = logs.chained(self.chain, self._digest_of(item.state), item.frame.body)
        if self.chain != item.frame.digest:
            why = "the state after this event, or the frame's bytes, are not what the engine had"
            self._differ(step, number, "chained digest", hexadecimal(item.frame.digest), hexadecimal(self.chain), why)
        for report in item.frame.rank_digests:
            self._rank(report, number, item.frame.details)

    def _rank(self, report: RankDigest, number: int, told: tuple[RankDetail, ...]) -> None:
        due = self._step_digests.get(report.step)
        if due is None:
            self._unchecked += 1
            return
        self._rank_digests += 1
        if due != report.digest:
            fields = drifted_fields(told, report, self._reported.get(report.step))
            why = f"rank {report.rank} had another state in step {report.step}" + (f": {', '.join(fields)}" if fields else "")
            field = f"digest of rank {report.rank}"
            self._differ(report.step, number, field, hexadecimal(report.digest), hexadecimal(due), why)
        elif detail := next(iter(told_by(report, told)), None):
            self._tokens(detail, number)
        else:
            self._equal_steps[report.rank] = report.step

    def _tokens(self, told: RankDetail, number: int) -> None:
        """A rank has told details beside the right digest: digests are of structure, so its tokens are others."""
        since = self._equal_steps.get(told.rank)
        why = f"rank {told.rank} had sampled another token than the engine before step {told.step}"
        why += f", for request {', '.join(map(str, told.requests))}" if told.requests else ""
        why += f"; up to step {since} it agreed" if since is not None else ""
        state = self._reported.get(told.step)
        due = hexadecimal(state.token_digest) if state is not None and self._has_texts else ""
        self._differ(told.step, number, f"tokens of rank {told.rank}", hexadecimal(told.token_digest) if due else "", due, why)

    def ended(self, item: LogEnd) -> None:
        self.end = item

    def broken(self, item: Broken) -> None:
        self._differ(item.state.planned - 1, item.number, item.field, "", "", item.message)

    def _differ(self, step: int, event: int, field: str, recorded: str, recomputed: str, message: str) -> None:
        """Only the first of these counts."""
        self.difference = self.difference or Difference(
            step=step, event=event, field=field, recorded=recorded, recomputed=recomputed, message=message
        )

    def verdict(self) -> Verdict:
        difference = self.difference or next(iter(self.decisions), None)
        return Verdict(
            same=difference is None and self.end is not None and self.end.kind in ("complete", "torn"),
            written_by=self._written_by,
            first_event=self._first_event,
            events=self._events,
            steps=self._steps,
            plans_unchecked=self._plans_unchecked,
            decisions_differ=self._decisions_differ,
            decisions=self.decisions,
            digests_unchecked=self._digests_unchecked,
            digests=self._digests,
            rank_digests=self._rank_digests,
            rank_digests_unchecked=self._unchecked,
            keyframes=self._keyframes,
            laws="all" if self._all_laws else "cheap",
            difference=difference,
            end=self.end,
        )


def why_not_digested(log: Log) -> str:
    """Why this log's digests mean nothing here, "" if they do."""
    written = log.header.digest_version
    if written == DIGEST_VERSION:
        return ""
    ours = f"this code computes version {DIGEST_VERSION}: states fold, digests not compared"
    return f"written with digest version {written}; {ours}"


def why_not_decided(log: Log, own_policy: bool = False) -> str:
    """Why this log's plans cannot be decided again here, "" if they can. Imports nothing unless `own_policy`."""
    name = log.header.started.config.policy
    if name not in BUILT_IN and not own_policy:
        return f"the log names the policy {name}, and a log is no reason to run code: give --own-policy to import it"
    try:
        policy_of(name)
    except PolicyError as error:
        return str(error)
    return ""


def told_by(report: RankDigest, told: tuple[RankDetail, ...]) -> list[RankDetail]:
    """The details that belong to a report."""
    return [each for each in told if (each.rank, each.step) == (report.rank, report.step)]


def drifted_fields(told: tuple[RankDetail, ...], report: RankDigest, state: State | None) -> list[str]:
    """Names of what the rank had otherwise than `state`, in which the step ran; none if it has told no details."""
    found = told_by(report, told)
    if not found or state is None:
        return []
    return [name for name, one, other in zip(DETAIL_NAMES, found[0].words, details(state)) if one != other]


def plan_difference(recorded: StepPlanned, decided: StepPlanned | None) -> tuple[str, str, str]:
    """Field, recorded and recomputed value of the first field in which two plans differ."""
    if decided is None:
        return "plan", str(recorded), "nothing to plan"
    for field in StepPlanned.__struct_fields__:
        one, other = getattr(recorded, field), getattr(decided, field)
        if one != other:
            return f"plan.{field}", str(one), str(other)
    return "plan", str(recorded), str(decided)
