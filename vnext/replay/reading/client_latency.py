"""Client latency: the worst latencies that clients of one segment saw, noted while the segment is folded for its index.

Owns the notes: the latest first tokens, the longest gaps between tokens, the slowest steps, and how often each time
occurred. It also notes what is open at the segment's ends, namely requests that arrived before it or outlive it;
`joining.py` closes those. The notes live in the cache beside the segment, so `slow` folds nothing twice. Times are
timestamps in microseconds, on one clock for all segments. Times after the last timestamp are unknown and left out.
Without timestamps a step counts as one millisecond.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np

from vnext.replay.reading.step_counts import rounded
from vnext.replay.reading.times import STEP_US, Clock
from vnext.state.events import RequestAborted, RequestArrived, StepCommitted, generated_by
from vnext.state.fold_commit import MatchedSamples
from vnext.state.state import State, StepInFlight
from vnext.state.traits import everyone_leaves, loses_steps

if TYPE_CHECKING:
    from vnext.replay.reading.folding import Folded
    from vnext.replay.reading.strides import Run

KEPT = 1_000
"""This many of the worst of each kind are noted."""
NONE = -1


class First(msgspec.Struct, frozen=True, kw_only=True):
    """A request's first token: sampled by `step`, `ms` after its arrival in step `arrived_step`. The request waited in
    the queue until `admitted_step`. Its prompt has `prompt` tokens, of which `cached` were in the cache."""

    ms: float
    id: int
    arrived_step: int
    admitted_step: int
    step: int
    prompt: int
    cached: int


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Two consecutive tokens of one request, `ms` apart, sampled by `last_step` and `step`, with the preemptions
    between them. It is the longest gap of the `requests` to which `step` gave another token. `tokens` is the most
    that a step in between computed.
    """

    ms: float
    id: int
    last_step: int
    step: int
    preempted: int
    tokens: int
    requests: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step: `ms` from its plan, or from the commit before if that came later, to its commit; what it computed; and
    the request that it computed most for (`most_id`, `most_tokens`)."""

    ms: float
    step: int
    tokens: int
    requests: int
    most_id: int
    most_tokens: int


class Alive(msgspec.Struct, kw_only=True, array_like=True):
    """A live request so far. `is_older`: it arrived before the segment began, or came back from another engine with tokens,
    and has received no token in the segment yet.

    `us` is the time of its last token (sampled in `step`), or of its arrival if `step` is NONE; None if unknown. Since
    then it was preempted `preempted` times, and a step computed at most `most` tokens.
    """

    id: int
    us: float | None
    arrived_step: int
    prompt: int = 0
    admitted_step: int = NONE
    cached: int = 0
    step: int = NONE
    preempted: int = 0
    most: int = 0
    is_older: bool = False


class Opened(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The first token in this segment of an older request: the notes about it here (`alive`), the step and the time."""

    alive: Alive
    step: int
    us: float


class Early(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A step that was planned before the segment and committed in it. `ms` is the time of its commit."""

    done: Step
    us: float
    last_us: float | None


class ClientLatency(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The notes of one segment. Worst first, at most KEPT of each kind; `first_us`, `gap_us` and `step_us` count all
    times (step_counts.rounded).

    `alive` are the requests at its end, `planned_us` are the plan times of the steps in flight there, `last_us` is its
    last commit.
    """

    clock: str = "steps"
    firsts: list[First] = []
    gaps: list[Gap] = []
    steps: list[Step] = []
    first_us: dict[int, int] = {}
    gap_us: dict[int, int] = {}
    step_us: dict[int, int] = {}
    opened: list[Opened] = []
    early: list[Early] = []
    alive: list[Alive] = []
    planned_us: dict[int, float | None] = {}
    last_us: float | None = None


latency_decoder = msgspec.msgpack.Decoder(ClientLatency)


Timed = TypeVar("Timed", First, Gap, Step)


class Worst(Generic[Timed]):
    """The longest times of a sequence, and how often each time occurred. Mutable."""

    def __init__(self, entries: Sequence[Timed], counts: dict[int, int]) -> None:
        self._heap: list[tuple[tuple[float, int], Timed]] = [((entry.ms, -place), entry) for place, entry in enumerate(entries)]
        heapq.heapify(self._heap)
        self._met = len(entries)
        self._counts = Counter(counts)  # in us of three digits
        self._times: Counter[float] = Counter()  # in ms, unrounded
        self._many: dict[int, list[np.ndarray]] = {}

    def meet(self, ms: float, made: Callable[[], Timed]) -> None:
        """Add a time; `made` builds the entry if it is one of the longest. Of equal times the first is kept."""
        self._times[ms] += 1
        self._offer(ms, made)

    def meet_all(self, ms: np.ndarray, each: int, made: Callable[[int, float], Timed]) -> None:
        """Add times (float64[n]), each occurring `each` times; `made` builds the entry at an index. nan means no time."""
        known = np.flatnonzero(~np.isnan(ms))
        self._many.setdefault(each, []).append(ms[known])
        if len(self._heap) == KEPT:
            known = known[ms[known] > self._heap[0][0][0]]
        for place, value in zip(known.tolist(), ms[known].tolist()):
            self._offer(value, partial(made, place, value))

    def add(self, ms: float, count: int) -> None:
        """Count a time `count` times without an entry."""
        if count:
            self._times[ms] += count

    def _offer(self, ms: float, made: Callable[[], Timed]) -> None:
        self._met += 1
        key = (ms, -self._met)
        if len(self._heap) < KEPT:
            heapq.heappush(self._heap, (key, made()))
        elif key > self._heap[0][0]:
            heapq.heapreplace(self._heap, (key, made()))

    def entries(self) -> list[Timed]:
        return [entry for _, entry in sorted(self._heap, key=lambda pair: pair[0], reverse=True)]

    def counts(self) -> dict[int, int]:
        """How often each time occurred, in us of three digits."""
        for each, arrays in self._many.items():
            values, times = np.unique(np.concatenate(arrays), return_counts=True)
            for value, count in zip(values.tolist(), times.tolist()):
                self._times[value] += count * each
        for value, count in self._times.items():
            self._counts[rounded(value * 1e3)] += count
        self._times.clear()
        self._many.clear()
        return dict(sorted(self._counts.items()))


class LatencyCollector:
    """Collects the notes while a segment is folded, optionally continuing from earlier notes of it. Mutable."""

    def __init__(self, before: ClientLatency | None, first: State, clock: Clock) -> None:
        begun = before or _begun(first)
        self._clock = clock
        self._alive = {each.id: msgspec.structs.replace(each) for each in begun.alive}
        self._planned_us = dict(begun.planned_us)
        self._last_us = begun.last_us
        self._tokens = [scheduled.tokens for scheduled in first.in_flight]
        self._first_step = self._committed_steps = first.committed
        self._abreast: dict[int, None] = {}  # in order: the requests to which the last commit gave a token
        self._abreast_step = NONE
        self._abreast_us: float | None = None
        self._opened, self._early = list(begun.opened), list(begun.early)
        self.firsts = Worst(begun.firsts, begun.first_us)
        self.gaps = Worst(begun.gaps, begun.gap_us)
        self.steps = Worst(begun.steps, begun.step_us)

    def forget(self) -> None:
        """Count from here on only."""
        self.firsts, self.gaps, self.steps = Worst[First]([], {}), Worst[Gap]([], {}), Worst[Step]([], {})

    def hear(self, item: Folded, matched: MatchedSamples | None) -> None:
        event, before, after = item.event, item.before, item.after
        us = self._clock.known_us(item.frame_end, before.committed)
        match event:
            case RequestArrived():
                self._alive[event.id] = Alive(
                    id=event.id, us=us, arrived_step=before.planned, prompt=len(event.prompt) // 4,
                    is_older=bool(generated_by(event)),
                )  # fmt: skip
            case StepCommitted():
                assert matched is not None, "a commit has samples"
                self._committed(event, before, matched, us)
            case RequestAborted():
                for id_ in event.ids:
                    if id_ not in after.requests:
                        self._close(id_)
        if (plan := item.plan) is not None:
            self._planned_us[plan.step] = us
            for row in plan.preempted:
                self._alive[int(before.rows.id[row])].preempted += 1
            self._planned(after, len(before.rows) - len(plan.preempted))
        elif loses_steps(event):
            self._lost_steps(before, everyone_leaves(event))

    # ---- event by event ------------------------------------------------------------------------------------------

    def _planned(self, after: State, came: int) -> None:
        """A step is planned that requests have joined, from row `came` on."""
        scheduled = after.in_flight[-1]
        self._tokens.append(scheduled.tokens)
        for id_ in after.rows.id[came:].tolist():
            alive = self._alive[id_]
            if alive.admitted_step == NONE:
                alive.admitted_step, alive.cached = scheduled.step, int(scheduled.starts[scheduled.ids == id_][0])

    def _lost_steps(self, before: State, all_wait: bool) -> None:
        """Steps in flight never end. Where `all_wait`, the next token of each running request comes from a place in the queue."""
        for scheduled in before.in_flight:
            self._planned_us.pop(scheduled.step, None)
        self._fall_behind(list(self._abreast))
        self._abreast, self._abreast_us = {}, None
        for id_ in before.rows.id.tolist() if all_wait else ():
            self._alive[id_].preempted += 1

    def _committed(self, event: StepCommitted, before: State, matched: MatchedSamples, us: float | None) -> None:
        self._step(before.in_flight[0], us)
        ids = before.rows.id[matched.rows]
        self._tell(ids.tolist(), event.step, us)
        for id_ in ids[matched.stopped | matched.at_limit].tolist() if matched.ended else ():
            self._close(id_)

    def _close(self, id_: int) -> None:
        self._alive.pop(id_, None)
        self._abreast.pop(id_, None)

    def _step(self, scheduled: StepInFlight, us: float | None) -> None:
        self._committed_steps = scheduled.step + 1
        is_early, is_first = scheduled.step not in self._planned_us, scheduled.step == self._first_step
        began_us, last_us = self._planned_us.pop(scheduled.step, None), self._last_us
        self._ended(scheduled.step, us)
        most = int(scheduled.counts.argmax())
        facts = dict(
            step=scheduled.step, tokens=scheduled.tokens, requests=len(scheduled.ids), most_id=int(scheduled.ids[most]),
            most_tokens=int(scheduled.counts[most]),
        )  # fmt: skip
        if is_early and us is not None and (is_first or last_us is not None):
            self._early.append(Early(done=Step(ms=0.0, **facts), us=us, last_us=last_us))
        elif us is not None and began_us is not None:
            ms = (us - max(began_us, last_us or 0.0)) / 1e3
            self.steps.meet(ms, lambda: Step(ms=ms, **facts))

    def _ended(self, step: int, us: float | None) -> None:
        """Note when a step ended. If the next step was already planned, it begins at this time, which may be unknown."""
        self._last_us = us
        if us is None and step + 1 in self._planned_us:
            self._planned_us[step + 1] = None

    def _tell(self, ids: list[int], step: int, us: float | None) -> None:
        """Give each of these requests one token. Requests that also got one in the previous commit are handled all at
        once."""
        reported, abreast = dict.fromkeys(ids), self._abreast
        together = ids if reported.keys() == abreast.keys() else [id_ for id_ in ids if id_ in abreast]
        if len(together) < len(abreast):
            self._fall_behind([id_ for id_ in abreast if id_ not in reported])
        waited = [] if len(together) == len(ids) else self._singly([id_ for id_ in ids if id_ not in abreast], step, us)
        if together and us is not None and self._abreast_us is not None:
            most = self._tokens[step - self._first_step]
            alike = Alive(id=together[0], us=None, arrived_step=NONE, step=self._abreast_step, most=most)
            waited.insert(0, ((us - self._abreast_us) / 1e3, alike, len(together)))
        if waited:
            gap_met(self.gaps, waited, step)
        self._abreast, self._abreast_step, self._abreast_us = reported, step, us

    def _fall_behind(self, ids: list[int]) -> None:
        """These requests got a token in the previous commit and none in this one."""
        for id_ in ids:
            alive = self._alive[id_]
            alive.us, alive.step, alive.most, alive.is_older = self._abreast_us, self._abreast_step, 0, False

    def _singly(self, ids: list[int], step: int, us: float | None) -> list[tuple[float, Alive, int]]:
        """The waits of requests that get their first token, or a token after a pause."""
        waited = []
        for id_ in ids:
            alive = self._alive[id_]
            alive.most = max(alive.most, self._most_since(alive, step + 1))
            if us is not None and alive.is_older:
                self._opened.append(Opened(alive=msgspec.structs.replace(alive), step=step, us=us))
            elif us is not None and alive.us is not None:
                if alive.step == NONE:
                    self._first(alive, step, (us - alive.us) / 1e3)
                else:
                    waited.append(((us - alive.us) / 1e3, msgspec.structs.replace(alive), 1))
            alive.preempted, alive.step, alive.is_older = 0, step, False
        return waited

    def _first(self, alive: Alive, step: int, ms: float) -> None:
        self.firsts.meet(ms, lambda: first_of(alive, step, ms))

    def _most_since(self, alive: Alive, end_step: int) -> int:
        """The most tokens of any step between a request's last token and this step, among the steps committed in this
        segment."""
        if alive.step == NONE and not alive.is_older:
            return 0
        return max(self._tokens[max(0, alive.step + 1 - self._first_step) : end_step - self._first_step], default=0)

    # ---- a run at once -------------------------------------------------------------------------------------------

    def meet_run(self, run: Run) -> None:
        """Take a folded run of steady frames."""
        us = self._frames_us(run)
        known = [None if np.isnan(each) else float(each) for each in (us[0], us[-1])]
        ids, in_flight = run.ids.tolist(), run.in_flight
        self._tokens += run.plans[:, 1].tolist()
        self._step(in_flight[0], known[0])
        self._tell(ids, run.step, known[0])
        self._committed_steps = run.step + run.frames
        self._steps_of(run, us, ids)
        self._abreast_step, self._abreast_us = run.step + run.frames - 1, known[1]
        self._plans_of(run, us)
        self._ended(self._committed_steps - 1, known[1])

    def _frames_us(self, run: Run) -> np.ndarray:
        """When each frame was written (float64[n]); nan where unknown."""
        if self._clock.timestamped:
            return self._clock.frames_us(run.next_events)
        return (run.step + np.arange(run.frames)) * STEP_US

    def _steps_of(self, run: Run, us: np.ndarray, ids: list[int]) -> None:
        """Note all steps of a run except the first. Each was planned before the step before it was committed."""
        ms, requests, least = np.diff(us) / 1e3, len(ids), ids[0]
        flown = run.in_flight[1 : run.frames]
        tokens = [scheduled.tokens for scheduled in flown] + run.plans[: run.frames - 1 - len(flown), 1].tolist()

        def step(place: int, ms: float) -> Step:
            number, most = run.step + 1 + place, (least, 1)
            if place < len(flown):
                scheduled = flown[place]
                row = int(scheduled.counts.argmax())
                most = int(scheduled.ids[row]), int(scheduled.counts[row])
            return Step(ms=ms, step=number, tokens=tokens[place], requests=requests, most_id=most[0], most_tokens=most[1])

        def gap(place: int, ms: float) -> Gap:
            number = run.step + 1 + place
            return Gap(
                ms=ms, id=least, last_step=number - 1, step=number, preempted=0, tokens=tokens[place], requests=requests
            )

        for scheduled in flown:
            self._planned_us.pop(scheduled.step, None)
        self.steps.meet_all(ms, 1, step)
        self.gaps.meet_all(ms, requests, gap)

    def _plans_of(self, run: Run, us: np.ndarray) -> None:
        """Note the plan times of the steps in flight after a run."""
        for scheduled in run.after.in_flight:
            place = scheduled.step - run.in_flight[-1].step - 1
            if place >= 0:
                now = us[place] if self._clock.timestamped else us[place] + STEP_US
                self._planned_us[scheduled.step] = None if np.isnan(now) else float(now)

    # ---- the end -------------------------------------------------------------------------------------------------

    def done(self) -> ClientLatency:
        """The notes so far. Folding may continue."""
        self._fall_behind(list(self._abreast))
        most = (max(each.most, self._most_since(each, self._committed_steps)) for each in self._alive.values())
        alive = [msgspec.structs.replace(each, most=tokens) for each, tokens in zip(self._alive.values(), most)]
        return ClientLatency(
            clock="stamps" if self._clock.timestamped else "steps", firsts=self.firsts.entries(), gaps=self.gaps.entries(),
            steps=self.steps.entries(), first_us=self.firsts.counts(), gap_us=self.gaps.counts(), step_us=self.steps.counts(),
            opened=list(self._opened), early=list(self._early), alive=alive, planned_us=dict(self._planned_us),
            last_us=self._last_us,
        )  # fmt: skip


def _begun(first: State) -> ClientLatency:
    """The notes at a segment's beginning."""
    return ClientLatency(
        alive=[Alive(id=id_, us=None, arrived_step=NONE, is_older=True) for id_ in first.requests.mapping()]
    )


def first_of(alive: Alive, step: int, ms: float) -> First:
    """The entry for a request's first token, sampled by this step."""
    return First(
        ms=ms,
        id=alive.id,
        arrived_step=alive.arrived_step,
        admitted_step=alive.admitted_step,
        step=step,
        prompt=alive.prompt,
        cached=alive.cached,
    )


def gap_met(gaps: Worst[Gap], waited: list[tuple[float, Alive, int]], step: int) -> None:
    """Note the waits that a step ended, each shared by several requests: the longest becomes an entry, the others are
    only counted."""
    longest = max(range(len(waited)), key=lambda place: waited[place][0])
    requests = sum(count for _, _, count in waited)
    for place, (ms, _, count) in enumerate(waited):
        gaps.add(ms, count - (place == longest))
    ms, alive, _ = waited[longest]
    gaps.meet(ms, lambda: Gap(
        ms=ms, id=alive.id, last_step=alive.step, step=step, preempted=alive.preempted, tokens=alive.most, requests=requests,
    ))  # fmt: skip
