"""Recording: what a log shows by its times: what came from outside, how long each step took, and what requests were answered.

Events hold no step times. Timestamps beside the segments say when each frame was written, and how long rank 0 was busy
with each step (times.py). A turn's overhead (transport, the engine core, waking) is the median time that was not busy,
from a step's plan, or from the commit before if that came later, to its commit. There is one median per kind of turn:
after a wait or not, and whether a prompt begins in it: that costs the API server and the engine core something, a further
chunk of the prompt nothing. Without busy times that whole span is the step's time. A log without times
(imported from a trace, or recorded by an early version) runs on the step times of another log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.replay.futures.loads import Loads, LoadsSeen
from vnext.replay.futures.revived import Revived, revived
from vnext.replay.futures.step_times import features_of
from vnext.replay.reading.folding import Broken, Folded, first_state, fold
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    MemoryRanShort,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepLimitRaised,
    unpack_tokens,
)
from vnext.state.outputs import outputs
from vnext.state.state import State, StepInFlight, runs_in
from vnext.state.traits import everyone_leaves

KIND_MIN = 10
"""Fewer turns of a kind do not determine its usual overhead."""


class Outside(msgspec.Struct, frozen=True):
    """An outside event, its time in us and, for an abort, how many tokens each request had received."""

    time_us: float
    event: AnyEvent
    reported: dict[int, int]


class Recorded(msgspec.Struct, frozen=True):
    """A whole log by its times. Its n committed steps have `features` float64[n, 4], took `step_us` float64[n], began
    at `began_us` and were committed at `ends_us`; in those of `begins` bool[n] a prompt begins. `overhead_us` float64[2, 2] is a
    turn's overhead by `kinds_of`. `entries` is what each step computed (StepInFlight.entries), `commits` what it sampled. `answers`
    are tokens by request; those of `lives`, the requests in state `first` where the log begins, start with their last token there.
    `times_us` is when each of `events` happened. `loads` are those of adapters. `places` are the committed steps' places in the
    lists by their numbers, some of which ranks may have lost.
    """

    first: State
    lives: list[Revived]
    outside: list[Outside]
    features: np.ndarray
    begins: np.ndarray
    step_us: np.ndarray
    overhead_us: np.ndarray
    began_us: np.ndarray
    ends_us: np.ndarray
    entries: list[np.ndarray]
    commits: list[StepCommitted]
    answers: dict[int, list[int]]
    events: list[AnyEvent]
    times_us: list[float]
    loads: Loads
    drafts: DraftsSeen
    places: dict[int, int]


def recorded(log: Log) -> Recorded:
    """Everything in a log that what-if needs. Raises UnusableLog if it has no times."""
    timestamps = timestamps_of(log)
    if timestamps is None:
        raise UnusableLog(
            f"{log.paths[0].parent} has no step times (*.vnexttimes beside the segments): "
            "record a log with this version, or name one with --times-of"
        )
    clock = Clock(timestamps)
    taken = _Taken(timestamps.busy_ns, first_state(log))
    for item in fold(log):
        if isinstance(item, Broken):
            break
        if isinstance(item, Folded):
            if (now_us := clock.known_us(item.frame_end, item.before.committed)) is None:
                break  # a killed engine leaves its last second without times
            taken.hear(item, now_us)
    return taken.recorded()


def on_times_of(log: Log, learnt: Recorded) -> Recorded:
    """The requests of `log`, which has no times, with the steps of `learnt`, none of which is the log's own. Requests come at their
    arrival times, the first at 0; an abort after as many tokens as the log had reported, a reset of the cache together with the
    request before it."""
    taken, now_us, began_ns = _Taken({}, first_state(log)), 0.0, None
    for item in fold(log):
        if isinstance(item, Folded):
            if isinstance(item.event, RequestArrived):
                began_ns = item.event.arrival_ns if began_ns is None else began_ns
                now_us = max(now_us, (item.event.arrival_ns - began_ns) / 1e3)
            taken.hear(item, now_us)
    own = taken.recorded()
    aborts_stop = (
        replace(each, event=replace(each.event, reason="stop")) if isinstance(each.event, RequestAborted) else each
        for each in own.outside
    )
    return replace(
        learnt, first=own.first, lives=own.lives, outside=list(aborts_stop), entries=[], commits=[], answers=own.answers, events=[],
        times_us=[], loads=Loads([], learnt.loads.took_us), drafts=own.drafts, places={},
    )  # fmt: skip


class _Taken:
    """Collects a recording while the log is folded. Mutable."""

    def __init__(self, busy_ns: dict[int, int], first: State) -> None:
        self._busy_ns = busy_ns
        self._first, self._lives = first, revived(first)
        self._planned_us: dict[int, float] = {}
        self._last_us = 0.0
        self._outside: list[Outside] = []
        self._steps: list[tuple[np.ndarray, float, float]] = []
        self._entries: list[np.ndarray] = []
        self._commits: list[StepCommitted] = []
        self._places: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {life.arrival.id: unpack_tokens(life.last).tolist() for life in self._lives}
        self._events: list[AnyEvent] = []
        self._times_us: list[float] = []
        self._loads, self._drafts = LoadsSeen(), DraftsSeen({}, {})

    def hear(self, item: Folded, now_us: float) -> None:
        event = item.event
        self._events.append(event)
        self._times_us.append(now_us)
        self._loads.hear(event, item.after, now_us)
        if (plan := item.plan) is not None:
            self._planned_us[plan.step] = now_us
        if isinstance(event, StepCommitted):
            scheduled = item.before.in_flight[0]
            began_us = max(self._planned_us.get(event.step, 0.0), self._last_us)
            self._steps.append((features_of(scheduled), began_us, now_us))
            self._entries.append(scheduled.entries)
            self._places[event.step] = len(self._commits)
            self._commits.append(event)
            self._last_us = now_us
            self._drafts.hear(scheduled, event, self._answers)
            for news in outputs(item.before, event, item.after):
                self._answers.setdefault(news.id, []).append(news.token)
        if isinstance(event, RequestResumed):
            self._answers[event.id] = unpack_tokens(event.generated).tolist()
        if (came := outside_of(event, now_us, self._answers)) is not None:
            self._outside.append(came)

    def recorded(self) -> Recorded:
        features = np.array([step[0] for step in self._steps]).reshape(-1, 4)
        began, ends = (np.array([step[place] for step in self._steps], dtype=np.float64) for place in (1, 2))
        prompts = Prompts()
        begins = np.array([prompts.begin(each[0], int(each[3].sum())) for each in self._entries], dtype=bool)
        busy = np.array([self._busy_ns.get(step, 0) for step in self._places]) / 1e3
        all_busy = bool(len(busy)) and bool((busy > 0).all())
        step_us = busy if all_busy else ends - began
        overhead_us = overheads_of(kinds_of(begins, began, ends), ends - began - step_us)
        return Recorded(
            self._first, self._lives, self._outside, features, begins, step_us, overhead_us, began, ends, self._entries,
            self._commits, self._answers, self._events, self._times_us, self._loads.loads, self._drafts, self._places,
        )  # fmt: skip


def outside_of(event: AnyEvent, time_us: float, answers: dict[int, list[int]]) -> Outside | None:
    """What came to the engine from outside by this event, None where it was decided. `answers` are what requests have received. A
    change after which everyone computes anew stands as what it does to others: it empties the cache."""
    match event:
        case RequestAborted():
            return Outside(time_us, event, {id_: len(answers.get(id_, ())) for id_ in event.ids})
        case RequestArrived() | PrefixCacheReset() | EngineRecovered() | MemoryRanShort() | StepLimitRaised():
            return Outside(time_us, event, {})
    return Outside(time_us, PrefixCacheReset(), {}) if everyone_leaves(event) else None


class Prompts:
    """Which prompts have begun. Mutable: ask about steps in order."""

    def __init__(self) -> None:
        self._begun = set[int]()

    def begin(self, ids: np.ndarray, tokens: int) -> bool:
        """Whether a prompt begins in a step of so many tokens of these requests, of one of them more than one."""
        if tokens <= len(ids):
            return False
        count = len(self._begun)
        self._begun.update(ids.tolist())
        return len(self._begun) > count


def kinds_of(begins: np.ndarray, began_us: np.ndarray, ends_us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each step, whether the engine had waited before it, and whether a prompt begins in it (int64[n])."""
    waited = began_us > np.concatenate([[0.0], ends_us[:-1]])
    return waited.astype(np.int64), begins.astype(np.int64)


def overheads_of(kinds: tuple[np.ndarray, np.ndarray], overheads_us: np.ndarray) -> np.ndarray:
    """The usual overhead of each kind (float64[2, 2]); a rare kind gets that of all steps."""
    usual = np.full((2, 2), max(float(np.median(overheads_us)), 0.0) if len(overheads_us) else 0.0)
    for kind in np.ndindex(2, 2):
        of_kind = overheads_us[(kinds[0] == kind[0]) & (kinds[1] == kind[1])]
        if len(of_kind) >= KIND_MIN:
            usual[kind] = max(float(np.median(of_kind)), 0.0)
    return usual


# ---- drafts ------------------------------------------------------------------------------------------------------
# Drafts as a log shows them: how many a step made behind a request's tokens, and which of them were right.
#
# A draft follows from the request's tokens, and a hypothetical run gives each request its recorded ones. So a draft that the
# log shows is made again, and is right or wrong again. Of other drafts the log says nothing: they are made, and wrong.


class DraftsSeen(msgspec.Struct, frozen=True):
    """By request and place in its answer: `right` says whether a draft there was, `most` how many a step made from there on
    that could have had more."""

    right: dict[int, dict[int, bool]]
    most: dict[int, dict[int, int]]

    def hear(self, scheduled: StepInFlight, event: StepCommitted, answers: Mapping[int, Sequence[int]]) -> None:
        """Take in the commit of a step; `answers` are the tokens reported before it."""
        if scheduled.drafts is None or not scheduled.drafts.any():
            return
        sampled = scheduled.samples
        counts, drafted = runs_in(event, int(np.count_nonzero(sampled)))
        lines = zip(scheduled.ids[sampled].tolist(), scheduled.drafts[sampled].tolist(), counts.tolist(), drafted.tolist())
        for id_, planned, count, made in lines:
            place, right = len(answers.get(id_, ())), self.right.setdefault(id_, {})
            right.update((place + at, at < count - 1) for at in range(min(made, count)))
            if made < planned:
                self.most.setdefault(id_, {})[place] = made

    def run(self, id_: int, place: int, planned: int) -> tuple[int, int]:
        """How many drafts a step makes behind a request's answer of `place` tokens, and how many of them are kept."""
        made, right = min(planned, self.most.get(id_, {}).get(place, planned)), self.right.get(id_, {})
        kept = next((at for at in range(made) if not right.get(place + at, False)), made)
        return made, kept
