"""The ledger: each step of a log with its time, its size, who waited for what, and which of its work had been done before.

Owns the collecting, one pass over the log; charging.py says what the time was lost to. A stretch in which requests live and no
step is in flight has an entry of its own, with what had stopped the engine. Times are microseconds since the machine's start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.log.codec import Frame, RankDetail
from vnext.log.reading import read
from vnext.replay.causes.reuse import Reuse
from vnext.replay.futures.step_times import features_of
from vnext.replay.reading.folding import IMPOSSIBLE, Folded, first_state
from vnext.replay.reading.source import Log, contents
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import STEP_US, Clock, timestamps_of
from vnext.sched.explain import explain
from vnext.state.events import (
    AdapterLoaded,
    AnyEvent,
    BlocksPromoted,
    EnginePaused,
    EngineRecovered,
    MemoryRanShort,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    WeightsChanged,
)
from vnext.state.fold_commit import MatchedSamples
from vnext.state.outputs import outputs
from vnext.state.state import Request, State, StepInFlight
from vnext.state.traits import line_of, loses_steps

LIMITS = ("sequences", "budget", "blocks")
ASKED_AGAIN = 16
"""While a queue stays the same, the scheduler is asked for its reasons in every so many steps."""
LOUD = (EngineRecovered, WeightsChanged, EnginePaused, PrefixCacheReset, MemoryRanShort)
Counted = Callable[[int], bool]
"""Whether a request counts."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One step, or one stretch without a step (`stopped` says what had stopped the engine). It ended at `end_us`, after `us`.

    `features` are those of step_times.py. `rows` requests of those that count were in the step, `waits` counts those that waited by
    reason, and `queue` is how many waited in all. `most_id` had the most tokens, `most`. `again` counts tokens that had been
    computed before, by why they were again. `busy_us` is how long rank 0 computed, 0 where the log does not say. `widest_id` had
    the most tokens in the cache, `widest`.
    """

    end_us: float
    us: float
    step: int
    stopped: str = ""
    features: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    rows: int = 0
    waits: dict[str, int] = {}
    queue: int = 0
    most_id: int = -1
    most: int = 0
    widest_id: int = -1
    widest: int = 0
    again: dict[str, int] = {}
    busy_us: float = 0.0
    free: int = 0


class Life(msgspec.Struct, kw_only=True):
    """A request: its prompt's tokens, its client, when it came, got its first token and ended, the time of steps that was its own
    (`step_us`), and that time times those that were there meanwhile. `end` is why it ended, "" while it lives."""

    prompt: int
    client: int
    priority: int
    came_us: float | None
    first_us: float | None = None
    last_us: float | None = None
    ended_us: float | None = None
    end: str = ""
    tokens: int = 0
    cost_us: float = 0.0
    step_us: float = 0.0
    name: str = ""
    weight: int = 1


class Ledger(msgspec.Struct, frozen=True):
    """A log's entries in order, its requests, and its loud events as (time, step, line). `clock` and `ended` as in `trace`.
    `drift`: when a rank reported that differed and whose place no other one took, and its report. `cached_tokens`: the room of the
    cache."""

    entries: list[Entry]
    lives: dict[int, Life]
    loud: list[tuple[float, int, str]]
    clock: str
    preemptions: int
    ended: str
    cached_tokens: int
    drift: tuple[float, RankDetail] | None = None


class _Planned(NamedTuple):
    """What is known of a step when it is planned (`us`): who waits behind it, how many in all, free blocks, work done again."""

    us: float | None = None
    waits: Counter[str] = Counter()
    queue: int = 0
    free: int = 0
    again: dict[str, int] = {}


class _Writing:
    """The ledger while the log is folded. Mutable, for one use."""

    def __init__(self, log: Log, first: State, counts: Counted) -> None:
        timestamps = timestamps_of(log)
        self.clock = Clock(timestamps, absolute=True)
        self._busy_ns = timestamps.busy_ns if timestamps is not None else {}
        self._counts = counts
        self._last_us: float | None = None if self.clock.timestamped else first.committed * STEP_US
        self._now_us = self._last_us
        self._planned: dict[int, _Planned] = {}
        self._asked: tuple[object, int, Counter[str]] = (None, 0, Counter())
        self._stopped = ""
        self._reuse = Reuse(first)
        self.entries: list[Entry] = []
        self.lives = {id_: _life(each, None) for id_, each in first.requests.items()}
        self.loud: list[tuple[float, int, str]] = []
        self.drift: tuple[float, RankDetail] | None = None

    @property
    def preemptions(self) -> int:
        return self._reuse.preemptions

    def hear(self, item: Folded, matched: MatchedSamples | None) -> None:
        us, event = self.clock.known_us(item.frame_end, item.before.committed), item.event
        self._now_us = us if us is not None else self._now_us
        self._reuse.hear(item)
        if isinstance(event, StepCommitted):
            assert matched is not None, "a commit matches samples"
            self._committed(item, event, us)
        elif item.plan is not None:
            self._plan(item, us)
        elif isinstance(event, RequestArrived):
            self.lives[event.id] = _life(event, us)
        elif isinstance(event, RequestAborted):
            self._end(item, event)
        self._note(event, item, us)

    def _note(self, event: AnyEvent, item: Folded, us: float | None) -> None:
        if isinstance(event, LOUD) and us is not None:
            self.loud.append((us, item.before.planned, line_of(event)))
        match event:
            case EngineRecovered():
                self._stopped, self.drift = "crash", None
            case MemoryRanShort():
                self._stopped = "memory"
            case WeightsChanged():
                self._stopped = "weights"
            case EnginePaused() if event.mode and self._stopped != "weights":
                self._stopped = "pause"
            case BlocksPromoted():
                self._stopped = self._stopped or "disk"
            case AdapterLoaded():
                self._stopped = self._stopped or "adapter"
        if loses_steps(event):
            self._planned.clear()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _plan(self, item: Folded, us: float | None) -> None:
        before, scheduled = item.before, item.after.in_flight[-1]
        if self.clock.timestamped and not before.in_flight and us is not None and self._last_us is not None:
            self._stretch(before, us, scheduled.step)
        self._stopped = "pause" if before.paused else ""
        waits, queue = self._waits(item), len(item.after.waiting)
        self._planned[scheduled.step] = _Planned(us, waits, queue, item.after.pool.free, self._reuse.again(item))

    def _stretch(self, before: State, us: float, step: int) -> None:
        """The time since the last commit, in which no step was in flight although requests lived."""
        assert self._last_us is not None
        since = {id_: us - max(self._last_us, self.lives[id_].came_us or 0.0) for id_, _ in before.requests.items()}
        longest = max(since.values(), default=0.0)
        if longest <= 0:
            return
        counted = sum(each for id_, each in since.items() if self._counts(id_)) / longest
        stopped = self._stopped or ("disk" if _reads(before) else "stall")
        waits = {stopped: round(counted)}
        self.entries.append(Entry(end_us=us, us=longest, step=step, stopped=stopped, waits=waits, queue=len(since)))

    def _waits(self, item: Folded) -> Counter[str]:
        """How many requests that count wait behind this plan, by reason; who waits behind another one waits for its reason."""
        before = item.before
        if not item.after.waiting:
            return Counter()
        queue, step, known = self._asked
        if queue is item.after.waiting and item.plan is not None and item.plan.step - step < ASKED_AGAIN:
            return known
        reasons, found = {wait.id: wait for wait in explain(before).waits}, Counter[str]()
        latest = int(before.rows.id.max(initial=-1)) if before.config.policy not in ("fcfs", "fair") else -1
        for entry in item.after.waiting:
            if self._counts(entry.id):
                wait = reasons.get(entry.id)
                first = reasons.get(wait.behind, wait) if wait is not None else None
                why = reason_word(first.why) if first is not None else "order"
                why = "memory" if why == "budget" and before.lowered_from else why
                found["order" if why in LIMITS and entry.id < latest else why] += 1
        self._asked = (item.after.waiting, item.before.planned, found)
        return found

    def _committed(self, item: Folded, event: StepCommitted, us: float | None) -> None:
        scheduled = item.before.in_flight[0]
        planned = self._planned.pop(scheduled.step, _Planned())
        lasted_us = self._lasted_us(us, planned)
        self._last_us = us
        counters = item.after.counters, item.before.counters
        rejected = counters[0].draft_tokens - counters[1].draft_tokens - (counters[0].accepted_tokens - counters[1].accepted_tokens)
        if rejected > 0:
            planned = planned._replace(again={**planned.again, "drafts": rejected})
        self._outputs(item, event, us)
        if us is not None and lasted_us is not None:
            self._enter(scheduled, us, lasted_us, planned)

    def _lasted_us(self, us: float | None, planned: _Planned) -> float | None:
        """How long a step took that ends at `us`, None where the log does not say; 0 for one heard of with the one before it."""
        if not self.clock.timestamped:
            return STEP_US
        starts = [each for each in (planned.us, self._last_us) if each is not None]
        return max(us - max(starts), 0.0) if us is not None and starts else None

    def _enter(self, scheduled: StepInFlight, us: float, lasted_us: float, planned: _Planned) -> None:
        ends = scheduled.starts + scheduled.counts
        most, widest = int(scheduled.counts.argmax()), int(ends.argmax())
        tokens, requests, context, attended = features_of(scheduled).tolist()
        self.entries.append(Entry(
            end_us=us, us=lasted_us, step=scheduled.step, features=(tokens, requests, context, attended),
            rows=sum(map(self._counts, scheduled.ids.tolist())), waits=planned.waits, queue=planned.queue,
            most_id=int(scheduled.ids[most]), most=int(scheduled.counts[most]),
            widest_id=int(scheduled.ids[widest]), widest=int(ends[widest]), again=planned.again,
            busy_us=self._busy_ns.get(scheduled.step, 0) / 1e3, free=planned.free,
        ))  # fmt: skip
        self._cost(scheduled.ids, scheduled.counts, lasted_us, planned.queue)

    def _cost(self, ids: np.ndarray, counts: np.ndarray, lasted_us: float, queue: int) -> None:
        """Split a step's time over its requests."""
        everyone, there = int(counts.sum()) or 1, len(ids) + queue
        for id_, count in zip(ids.tolist(), counts.tolist()):
            if id_ in self.lives:
                own_us = lasted_us * count / everyone
                self.lives[id_].step_us += own_us
                self.lives[id_].cost_us += own_us * there

    # ---- requests ------------------------------------------------------------------------------------------------

    def _outputs(self, item: Folded, event: StepCommitted, us: float | None) -> None:
        for news in outputs(item.before, event, item.after):
            if (life := self.lives.get(news.id)) is None:
                continue
            life.tokens += 1
            life.first_us = us if life.first_us is None else life.first_us
            life.last_us = us if us is not None else life.last_us
            if news.finish:
                life.ended_us, life.end = us, news.finish

    def _end(self, item: Folded, event: RequestAborted) -> None:
        for id_ in event.ids:
            if id_ in item.before.requests and id_ not in item.after.requests and id_ in self.lives:
                self.lives[id_].ended_us, self.lives[id_].end = self._now_us, f"abort ({event.reason})"

    def meet_reports(self, reports: Sequence[RankDetail]) -> None:
        """Take what a frame says of ranks that differ."""
        for each in reports[:1]:
            self.drift = self.drift or (self._now_us if self._now_us is not None else np.nan, each)

    def meet_run(self, run: Run) -> None:
        """Take a run of steady frames, in which every running request gets a token and the queue stays as it is."""
        times = self.clock.known_many(run.next_events, run.step + np.arange(run.frames))
        self._reuse.meet_run(run)
        waits, queue = self._asked[2] if run.after.waiting else Counter[str](), len(run.after.waiting)
        for place, us in enumerate(times):
            step = run.step + place
            ahead = run.in_flight[place] if place < len(run.in_flight) else _steady(run, place)
            planned = self._planned.pop(step, _Planned(None, waits, queue, run.after.pool.free))
            lasted_us, self._last_us = self._lasted_us(us, planned), us
            if us is not None and lasted_us is not None:
                self._enter(ahead, us, lasted_us, planned)
        for id_ in run.ids.tolist():
            if (life := self.lives.get(id_)) is not None:
                life.tokens += run.frames
                life.first_us = times[0] if life.first_us is None else life.first_us
                life.last_us = next((us for us in reversed(times) if us is not None), life.last_us)
        self._now_us = times[-1] if times[-1] is not None else self._now_us
        planned_us = times[-len(run.after.in_flight) :]
        for each, us in zip(run.after.in_flight, planned_us):
            self._planned[each.step] = _Planned(us, waits, queue, run.after.pool.free)


def _steady(run: Run, place: int) -> StepInFlight:
    """The step that the run's frames `place` places on commit, in which each request computes one token."""
    before = run.in_flight[-1]
    entries = before.entries.copy()
    entries[2] += entries[3] + place - len(run.in_flight)
    entries[3] = 1
    return StepInFlight(run.step + place, entries, before.samples, len(run.ids))


def _life(each: Request | RequestArrived, came_us: float | None) -> Life:
    return Life(
        prompt=len(each.prompt) // 4, client=each.client, weight=each.weight, priority=each.priority,
        came_us=came_us, name=each.name,
    )  # fmt: skip


def reason_word(why: str) -> str:
    """The scheduler's word, with one for each kind of lacking pages."""
    return {"room": "blocks", "preempted": "blocks", "caution": "crash", "states": "blocks"}.get(why, why)


def ledger(log: Log, counts: Counted = lambda _: True) -> Ledger:
    """The ledger of a log, of the requests that count. Raises UnusableLog."""
    first, ended = first_state(log), "complete"
    writing = _Writing(log, first, counts)
    try:
        for _, item in Folding(first, writing.hear).through((0, item) for item in read(contents(log.paths), steady=True)):
            if isinstance(item, Run):
                writing.meet_run(item)
            elif isinstance(item, Frame):
                writing.meet_reports(item.details)
    except IMPOSSIBLE as error:
        ended = str(error)
    clock = "stamps" if writing.clock.timestamped else "steps"
    room = first.config.page_count * first.config.block_size
    return Ledger(writing.entries, writing.lives, writing.loud, clock, writing.preemptions, ended, room, writing.drift)


def _reads(state: State) -> bool:
    """Whether a request waits alone for what ranks read."""
    return bool((state.tier is not None and state.tier.transfers) or (state.sought is not None and state.sought.searches))
