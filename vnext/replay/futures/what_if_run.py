"""A hypothetical run: a log's arrivals under another configuration, on a clock of predicted step times.

Owns the clock that drives the engine (vnext/sched/engine.py). Outside events come when they came, the scheduler makes every
decision, a step ends when the model says, and each request gets the tokens that the log recorded. Arrivals do not wait for
answers: a client that would have asked later, or something else, still asks when it did.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.replay.futures.loads import LoadClock, Yields
from vnext.replay.futures.recording import Recorded
from vnext.replay.futures.revived import salted, warmed
from vnext.sched.engine import Engine, unchecked
from vnext.sched.shortage import raised, ran_short
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    InputEncoded,
    InputsFound,
    InputsSought,
    MemoryRanShort,
    PinsYielded,
    RequestAborted,
    RequestArrived,
    RequestId,
    StepCommitted,
    StepLimitRaised,
    generated_by,
    pack_tokens,
    plan_of,
)
from vnext.state.feasibility import refusal
from vnext.state.reduce import reduce
from vnext.state.state import State, StepInFlight

AT_ONCE_US = 0.5
"""Results that arrive within this time are taken in one turn, as a late engine does."""
StepTime = Callable[[StepInFlight, float, bool], float]
"""When a step ends (us), from its plan, its beginning, and whether the engine had waited before it."""


class Served(msgspec.Struct):
    """One request: when it arrived, its first and last token (us, -1 if none), reported tokens, the longest gap between
    two. If `is_older`, it arrived before the log begins, at an unknown time, or began in an engine before this one."""

    arrived_us: float
    first_us: float = -1.0
    last_us: float = -1.0
    tokens: int = 0
    gap_us_max: float = 0.0
    finished: bool = False
    is_older: bool = False


class Ran(msgspec.Struct, frozen=True):
    """The result of a run. `gaps_us` float64[n] are gaps between tokens of one request; `end_us` is its last commit;
    `events` after the first are present only if requested. Of its `steps`, `larger` have more tokens or requests
    than any of the log.
    """

    served: list[Served]
    gaps_us: np.ndarray
    end_us: float
    steps: int
    larger: int
    preemptions: int
    refused: int
    hit_tokens: int
    queried_tokens: int
    events: list[AnyEvent]


def as_recorded(log: Recorded) -> StepTime:
    """Step times of the log itself, as long as its steps recur; after that the last one's time."""
    last_us = float(log.step_us[-1]) if len(log.step_us) else 0.0

    def end_us(scheduled: StepInFlight, begin_us: float, _: bool) -> float:
        place = recorded_place(log, scheduled)
        if place is not None:
            return float(log.ends_us[place])
        return begin_us + last_us

    return end_us


def recorded_place(log: Recorded, scheduled: StepInFlight) -> int | None:
    """Which of the log's steps this is; None if it computes something else."""
    place = log.places.get(scheduled.step)
    # with drafts, a step that is planned ahead does not know yet where it starts
    lines = [0, 1, 3] if scheduled.drafts is not None else slice(None)
    same = place is not None and np.array_equal(scheduled.entries[lines], log.entries[place][lines])
    return place if same else None


def rerun(log: Recorded, started: EngineStarted, config: SchedulerConfig, step_time: StepTime, exact: bool = False) -> Ran:
    """Run the log's arrivals to their end. `exact`: aborts come when they came, and the run ends with the log.

    Otherwise an abort after a stop string comes after the recorded number of tokens, at any time, and requests alive
    where the log begins without its start are revived there (revived.py); `exact` begins in that very state.
    """
    course = Rerun(log, replace(started, config=config), step_time, exact)
    course.run()
    return course.ran()


def retrace(log: Recorded, started: EngineStarted) -> Ran:
    """Run the log again under its own configuration. Each decision is made anew at its recorded place and time, and
    each step ends at its recorded time, up to the first decision or step that differs."""
    course = Rerun(log, started, as_recorded(log), exact=True)
    course.retrace()
    return course.ran()


class Clients:
    """What the requests of a run have got, by their ids in it. Mutable. `recorded_of`: their ids in the log; `stops`, by those:
    after how many tokens a client ends its request."""

    def __init__(self) -> None:
        self.served: dict[int, Served] = {}
        self.gaps = list[float]()
        self.recorded_of: dict[int, int] = {}
        self.stops: dict[int, int] = {}

    def tell(self, id_: int, finished: bool, now_us: float) -> bool:
        """A token comes. Returns whether the client ends the request behind it."""
        served = self.served[id_]
        if served.finished:
            return False  # a token behind its stop string
        if served.tokens:
            gap = now_us - served.last_us
            self.gaps.append(gap)
            served.gap_us_max = max(served.gap_us_max, gap)
        else:
            served.first_us = now_us
        served.last_us, served.tokens, served.finished = now_us, served.tokens + 1, finished
        stop = self.stops.get(self.recorded_of[id_]) if self.stops else None
        ends = stop is not None and not finished and served.tokens >= stop
        served.finished |= ends
        return ends


class Rerun:
    """An engine on its clock. Mutable."""

    def __init__(self, log: Recorded, started: EngineStarted, step_time: StepTime, exact: bool) -> None:
        self._log, self._step_time, self._exact = log, step_time, exact
        self._clients = Clients()
        self._ends: deque[float] = deque()
        self._device_us = 0.0
        self._counts: Counter[str] = Counter()
        self._most = log.features[:, :2].max(axis=0).tolist() if len(log.features) else (0.0, 0.0)
        self._ids: dict[int, RequestId]
        if exact:
            state, self._ids = log.first, {life.arrival.id: life.arrival.id for life in log.lives}
        else:
            state, self._ids = warmed(started, log.first, log.lives)
            self._counts["refused"] = len(log.lives) - len(self._ids)
        self._loading = LoadClock(log.loads, exact)
        self.engine = Engine(state, (self._loading, Yields()), unchecked)
        self._before = state.counters
        self._clients.recorded_of |= {id_: recorded for recorded, id_ in self._ids.items()}
        self._clients.served |= self._older()
        self._reported_at: dict[int, int] = {life.arrival.id: len(life.arrival.prompt) // 4 for life in log.lives}
        self._events: list[AnyEvent] = []
        self._outside = deque(self._timed())
        for scheduled in state.in_flight:
            self._device_us = step_time(scheduled, self._device_us, False)
            self._ends.append(self._device_us)

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def _now_us(self) -> float:
        return self._loading.now_us

    def _older(self) -> dict[int, Served]:
        """The revived requests: a running one has already received its last token; one without room has not."""
        running, found = set(self.state.rows.id.tolist()), dict[int, Served]()
        for life in self._log.lives:
            id_ = self._ids.get(life.arrival.id)
            if id_ is not None:
                found[id_] = Served(0.0, 0.0, 0.0, tokens=len(life.last) // 4 if id_ in running else 0, is_older=True)
        return found

    def _timed(self) -> list[tuple[float, AnyEvent]]:
        """The outside events that come by the clock. The others are stored with the number of tokens that they wait
        for."""
        timed = []
        for each in self._log.outside:
            if isinstance(each.event, RequestAborted) and each.event.reason == "stop" and not self._exact:
                self._clients.stops |= each.reported
            else:
                timed.append((each.time_us, each.event))
        return timed

    def take_outside(self) -> list[tuple[float, AnyEvent]]:
        """The outside events that are to come by the clock, with their times (us). They come only if they are given back."""
        taken, self._outside = list(self._outside), deque()
        return taken

    def give(self, time_us: float, event: AnyEvent) -> None:
        """An outside event is to come, behind those that were given before."""
        self._outside.append((time_us, event))

    def run(self, before_us: float = math.inf) -> None:
        """Run to the end, or through everything that happens before this time."""
        outside, ends = self._outside, self._ends
        if not self._exact:
            self._plan()
        while outside or ends or self._loading.next_us() < math.inf:
            coming = (outside[0][0] if outside else math.inf, ends[0] if ends else math.inf)
            next_us = min(*coming, self._loading.next_us())
            if next_us >= before_us:
                return
            self._loading.now_us = next_us
            while outside and outside[0][0] <= self._now_us:
                self._come(outside.popleft()[1])
            while ends and ends[0] <= self._now_us + AT_ONCE_US:
                self._commit()
            self._plan()
            if self._exact and len(self._events) >= len(self._log.events):
                return

    def retrace(self) -> None:
        """Run as far as everything is decided as it was; loads and yields come where they came."""
        self.engine = Engine(self.state, (), unchecked)
        for event, now_us in zip(self._log.events, self._log.times_us):
            self._loading.now_us = now_us
            match event:
                case _ if plan_of(event) is not None:
                    if not self._turn():
                        return
                    self._counts["steps"] += 1
                    self._ends.append(self._now_us)
                case StepCommitted():
                    if not self._ends:
                        return
                    self._commit()
                case AdapterEvicted() | AdapterLoaded():
                    recorded = event if isinstance(event, AdapterLoaded) else None
                    for decided in self._loading.decided(self.state, recorded)[:1]:
                        self._fold(decided)
                case PinsYielded():
                    self._fold(event)
                case _:
                    self._come(event)
            if self._events[-1:] != [event]:
                return

    def _come(self, event: AnyEvent) -> None:
        match event:
            case RequestArrived():
                arrival = event if self._exact or not self._log.lives else salted(event, self._log.first.config)
                arrival = replace(arrival, id=self.state.next_id)
                if refusal(self.state.config, arrival) is not None:
                    self._counts["refused"] += 1
                    return
                self._ids[event.id], self._clients.recorded_of[arrival.id] = arrival.id, event.id
                served = Served(now_us := self._now_us)
                if count := len(generated_by(arrival)) // 4:  # an engine before this one gave it its first tokens
                    served = Served(now_us, now_us, now_us, tokens=count, is_older=True)
                self._clients.served[arrival.id] = served
                self._fold(arrival)
            case RequestAborted():
                ids = event.ids if self._exact else tuple(self._ids[id_] for id_ in event.ids if id_ in self._ids)
                if ids:
                    self._fold(replace(event, ids=ids))
            case EngineRecovered():
                self._fold(event)
                self._ends.clear()
                self._device_us = self._now_us
            case MemoryRanShort() if self.state.in_flight:
                self._fold(ran_short(self.state, event.cause))
                self._ends.clear()
                self._device_us = self._now_us
            case StepLimitRaised() if self.state.lowered_from:
                self._fold(raised(self.state))
            case InputsSought() | InputsFound():
                self._look(replace(event, id=self._ids.get(event.id, RequestId(-1))))
            case PinsYielded() | MemoryRanShort() | StepLimitRaised() | InputEncoded():
                pass  # decided anew
            case _:
                self._fold(event)

    def _look(self, event: InputsSought | InputsFound) -> None:
        """Fold it, unless the request is elsewhere by now."""
        try:
            reduce(self.state, event)
        except IllegalEvent:
            return
        self._fold(event)

    def _turn(self) -> bool:
        """Take the next decision, behind the loads that are done and pins that yield; False where there is none."""
        plan = None
        for ready in self.engine.turn():
            self._events += ready.events
            plan = ready.plan
        return plan is not None

    def _plan(self) -> None:
        while self._turn():
            self._counts["steps"] += 1
            scheduled = self.state.in_flight[-1]
            self._counts["larger"] += scheduled.tokens > self._most[0] or len(scheduled.samples) > self._most[1]
            had_waited = self._now_us > self._device_us
            self._device_us = self._step_time(scheduled, max(self._now_us, self._device_us), had_waited)
            self._ends.append(self._device_us)

    def _commit(self) -> None:
        self._ends.popleft()
        self.engine.fold(self._result(self.state.in_flight[0]), apart=False)
        ready = self.engine.take()
        self._events += ready.events
        for _, outputs, _ in ready.news:
            for output in outputs:
                if self._clients.tell(output.id, bool(output.finish), self._now_us):
                    self._fold(RequestAborted(ids=(RequestId(output.id),), reason="stop"))

    def _result(self, scheduled: StepInFlight) -> StepCommitted:
        """The recorded token at each place; where none was recorded, a token that ends nothing. Drafts are as the log shows
        them (`DraftsSeen`).

        A step that equals one of the log's samples exactly what that one did, including samples that were never
        reported and drafts.
        """
        if self._exact and (recorded := recorded_place(self._log, scheduled)) is not None:
            return self._log.commits[recorded]
        drafts, ends, sampled = scheduled.drafts, scheduled.starts + scheduled.counts, scheduled.samples
        if drafts is None:
            return StepCommitted(step=scheduled.step, tokens=pack_tokens(self._sampled(scheduled.ids[sampled], ends[sampled])))
        ends = ends - drafts
        runs = [self._run(*each) for each in zip(*(each[sampled].tolist() for each in (scheduled.ids, ends, drafts)))]
        commit = StepCommitted(step=scheduled.step, tokens=pack_tokens([token for tokens, _ in runs for token in tokens]))
        if not any(made for _, made in runs):
            return commit
        return replace(commit, counts=bytes(len(tokens) for tokens, _ in runs), drafted=bytes(made for _, made in runs))

    def _sampled(self, ids: np.ndarray, ends: np.ndarray) -> list[int]:
        """As `_run`, for requests (int64[n]) without drafts: one token for each."""
        tokens, requests = list[int](), self.state.requests.mapping()
        answers, recorded_of, reported_at = self._log.answers, self._clients.recorded_of, self._reported_at
        for id_, end in zip(ids.tolist(), ends.tolist()):
            request, recorded = requests.get(id_), recorded_of[id_]
            reported = answers.get(recorded, ())
            place = end - reported_at.get(recorded, request.prompt_length) if request is not None else len(reported)
            tokens.append(reported[place] if place < len(reported) else self._filler(id_))
        return tokens

    def _run(self, id_: int, end: int, drafts: int) -> tuple[list[int], int]:
        """The tokens that a step samples of a request behind its first `end` tokens, and how many drafts it made there."""
        request, recorded = self.state.requests.get(id_), self._clients.recorded_of[id_]
        reported, began = self._log.answers.get(recorded, ()), self._reported_at.get(recorded)
        place = end - (request.prompt_length if began is None else began) if request is not None else len(reported)
        made, kept = self._log.drafts.run(recorded, place, drafts)
        return [reported[at] if at < len(reported) else self._filler(id_) for at in range(place, place + kept + 1)], made

    def _filler(self, id_: int) -> int:
        request = self.state.requests.get(id_)
        ends = {*self.state.config.eos_token_ids, *(request.sampling.stop_token_ids if request is not None else ())}
        return next(token for token in range(1, len(ends) + 2) if token not in ends)

    def _fold(self, event: AnyEvent) -> None:
        self.engine.fold(event)
        self._events += self.engine.take().events

    def ran(self) -> Ran:
        counters, before = self.state.counters, self._before
        return Ran(
            served=list(self._clients.served.values()), gaps_us=np.array(self._clients.gaps), end_us=self._now_us,
            preemptions=counters.preempted - before.preempted,
            hit_tokens=counters.prefix_hit_tokens - before.prefix_hit_tokens,
            queried_tokens=counters.prefix_queried_tokens - before.prefix_queried_tokens,
            events=self._events if self._exact else [],
            **{name: self._counts[name] for name in ("steps", "larger", "refused")},
        )  # fmt: skip
