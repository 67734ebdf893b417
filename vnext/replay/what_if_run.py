"""A run that never was: a log's arrivals under another configuration, on a clock of predicted step times.

Owns the clock-driven engine: what comes from outside comes when it came, every decision is the scheduler's, a step ends when
the model says, and each request is told what the log recorded. Arrivals do not wait for answers: clients that would have
asked later, or something else, still come when they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.replay.step_times import Recorded
from vnext.sched.schedule import schedule
from vnext.state.committing import settle
from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.reduce import reduce, start
from vnext.state.refusal import refusal
from vnext.state.state import Flight

StepTime = Callable[[Flight, float], float]
"""When a step ends (us) that is planned as this and begins then."""


class Served(msgspec.Struct):
    """One request: when it came, its first and last token (us, -1 if none), tokens told, the longest gap between two."""

    arrived_us: float
    first_us: float = -1.0
    last_us: float = -1.0
    tokens: int = 0
    gap_us_max: float = 0.0
    finished: bool = False


class Ran(msgspec.Struct, frozen=True):
    """What a run left. `gaps_us` float64[n] between tokens of one request; `end_us` its last commit; `events` after the
    first, only where they were asked for."""

    served: list[Served]
    gaps_us: np.ndarray
    end_us: float
    steps: int
    preemptions: int
    refused: int
    hit_tokens: int
    queried_tokens: int
    events: list[AnyEvent]


def as_recorded(log: Recorded) -> StepTime:
    """Step times of the log itself, as long as its steps are computed again; then the last one's time."""
    last_us = float(log.step_us[-1]) if len(log.step_us) else 0.0

    def end_us(flight: Flight, begin_us: float) -> float:
        step = flight.step
        if step < len(log.entries) and np.array_equal(flight.entries, log.entries[step]):
            return float(log.ends_us[step])
        return begin_us + last_us

    return end_us


def rerun(log: Recorded, started: EngineStarted, config: SchedulerConfig, step_time: StepTime, exact: bool = False) -> Ran:
    """Run the log's arrivals to their end. `exact`: aborts come when they came, and the run ends with the log.

    Otherwise an abort after a stop string comes after as many tokens as it did, whenever that is.
    """
    engine = _Engine(log, replace(started, config=config), step_time, exact)
    engine.run()
    return engine.ran()


def retrace(log: Recorded, started: EngineStarted) -> Ran:
    """The log again under its own configuration: each decision made anew at the place and time where it was made, each step
    ending where it ended, up to the first decision or step that is another one."""
    engine = _Engine(log, started, as_recorded(log), exact=True)
    engine.retrace()
    return engine.ran()


class _Engine:
    """The engine on its clock. Mutable."""

    def __init__(self, log: Recorded, started: EngineStarted, step_time: StepTime, exact: bool) -> None:
        self.state = start(started)
        self._log, self._step_time, self._exact = log, step_time, exact
        self._served: dict[int, Served] = {}
        self._gaps: list[float] = []
        self._ends: deque[float] = deque()
        self._device_us = self._now_us = 0.0
        self._steps = self._refused = 0
        self._ids: dict[int, int] = {}
        self._recorded_of: dict[int, int] = {}
        self._events: list[AnyEvent] = []
        self._stops: dict[int, int] = {}
        self._outside = deque(self._timed())

    def _timed(self) -> list[tuple[float, AnyEvent]]:
        """What comes by the clock; the others are remembered by how many tokens they wait for."""
        timed = []
        for each in self._log.outside:
            if isinstance(each.event, RequestAborted) and each.event.reason == "stop" and not self._exact:
                self._stops |= each.told
            else:
                timed.append((each.time_us, each.event))
        return timed

    def run(self) -> None:
        outside, ends = self._outside, self._ends
        while outside or ends:
            self._now_us = min(outside[0][0] if outside else float("inf"), ends[0] if ends else float("inf"))
            while outside and outside[0][0] <= self._now_us:
                self._come(outside.popleft()[1])
            if ends and ends[0] <= self._now_us:
                self._commit()
            self._plan()
            if self._exact and len(self._events) >= len(self._log.events):
                return

    def retrace(self) -> None:
        for event, self._now_us in zip(self._log.events, self._log.times_us):  # noqa: B020  one field of it
            match event:
                case StepPlanned():
                    plan = schedule(self.state)
                    if plan is None:
                        return
                    self._fold(plan)
                    self._steps += 1
                    self._ends.append(self._now_us)
                case StepCommitted():
                    if not self._ends:
                        return
                    self._commit()
                case _:
                    self._come(event)
            if self._events[-1] != event:
                return

    def _come(self, event: AnyEvent) -> None:
        match event:
            case RequestArrived():
                arrival = replace(event, id=self.state.next_id)
                if refusal(self.state.config, arrival) is not None:
                    self._refused += 1
                    return
                self._ids[event.id], self._recorded_of[arrival.id] = arrival.id, event.id
                self._served[arrival.id] = Served(self._now_us)
                self._fold(arrival)
            case RequestAborted():
                ids = tuple(self._ids[id_] for id_ in event.ids if id_ in self._ids)
                if ids:
                    self._fold(replace(event, ids=ids))
            case _:
                self._fold(event)

    def _plan(self) -> None:
        while (plan := schedule(self.state)) is not None:
            self._fold(plan)
            self._steps += 1
            self._device_us = self._step_time(self.state.flights[-1], max(self._now_us, self._device_us))
            self._ends.append(self._device_us)

    def _commit(self) -> None:
        self._ends.popleft()
        flight, before = self.state.flights[0], self.state
        event = StepCommitted(step=flight.step, tokens=self._tokens(flight))
        settled = settle(before, event)
        self._events.append(event)
        self.state = reduce(before, event, settled)
        for news in outputs(before, event, self.state, settled):
            self._tell(news.id, bool(news.finish))

    def _tell(self, id_: int, finished: bool) -> None:
        served, now_us = self._served[id_], self._now_us
        if served.tokens:
            gap = now_us - served.last_us
            self._gaps.append(gap)
            served.gap_us_max = max(served.gap_us_max, gap)
        else:
            served.first_us = now_us
        served.last_us, served.tokens, served.finished = now_us, served.tokens + 1, finished
        stop = self._stops.get(self._recorded_of[id_]) if self._stops else None
        if stop is not None and not finished and served.tokens >= stop:
            served.finished = True
            self._fold(RequestAborted(ids=(id_,), reason="stop"))

    def _tokens(self, flight: Flight) -> bytes:
        """What the log recorded at each place; where it recorded nothing, a token that ends nothing.

        A step that is the log's own samples exactly what it did, samples that nobody was told included.
        """
        log, step = self._log, flight.step
        if self._exact and step < len(log.entries) and np.array_equal(flight.entries, log.entries[step]):
            return log.tokens[step]
        tokens = []
        ids, ends = flight.ids[flight.samples].tolist(), (flight.starts + flight.counts)[flight.samples].tolist()
        for id_, end in zip(ids, ends):
            request = self.state.requests.get(id_)
            told = self._log.answers.get(self._recorded_of[id_], ())
            place = end - request.prompt_length if request is not None else len(told)
            tokens.append(told[place] if place < len(told) else self._filler(id_))
        return pack_tokens(tokens)

    def _filler(self, id_: int) -> int:
        request = self.state.requests.get(id_)
        ends = {*self.state.config.eos_token_ids, *(request.sampling.stop_token_ids if request is not None else ())}
        return next(token for token in range(1, len(ends) + 2) if token not in ends)

    def _fold(self, event: AnyEvent) -> None:
        self._events.append(event)
        self.state = reduce(self.state, event)

    def ran(self) -> Ran:
        counters = self.state.counters
        return Ran(
            served=list(self._served.values()), gaps_us=np.array(self._gaps), end_us=self._now_us, steps=self._steps,
            preemptions=counters.preempted, refused=self._refused, hit_tokens=counters.prefix_hit_tokens,
            queried_tokens=counters.prefix_queried_tokens, events=self._events if self._exact else [],
        )  # fmt: skip
