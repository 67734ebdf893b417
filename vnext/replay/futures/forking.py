"""Forking: other futures of a logged state, each from a seed.

Owns one future: arrivals like the log's own at the log's own rate, aborts and resets, random samples, and decisions
that the engine's own scheduler makes. A state is a value, so a future costs only its own steps.

The engine is the product's (vnext/sched/engine.py). A commit that no outside event follows is folded together with its plan if
the two are a steady turn; not so if there is a predicate, because a predicate sees every state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.log.codec import Frame
from vnext.replay.futures.loads import LoadsAtOnce, Yields
from vnext.replay.futures.redecided import Predicate
from vnext.replay.reading.source import Log
from vnext.replay.reading.strides import private_copy
from vnext.sched.engine import Engine, Ready, Source, Turns
from vnext.sim.findings import kind_of
from vnext.sim.rng import STRIDE, WORD, Rng
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.errors import LawBroken
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    plan_of,
)
from vnext.state.feasibility import refusal
from vnext.state.laws import check
from vnext.state.state import State

ALL_LAWS_EVENTS = 256
"""Events between two checks of all laws. The cheap ones are checked after every event, and all of them also at the end."""
ARRIVALS_MAX = 2_000
"""The first requests of a log, up to this number, are the templates for others."""
PER_MILLE = 1000
VOCAB_SIZE = 256
"""Used if a log does not record its vocabulary."""
SAMPLES = 1 << 12
NEVER = 1 << 62


class FutureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a future. In `arrivals_per_mille` of 1000 steps a request arrives, drawn from the log's
    `arrivals`; in `aborts_per_mille` one is aborted, in `resets_per_mille` the prefix cache is reset. It lasts at
    most `steps` steps.
    """

    steps: int
    arrivals: tuple[RequestArrived, ...]
    arrivals_per_mille: int
    aborts_per_mille: int
    resets_per_mille: int


class Future(msgspec.Struct, frozen=True, kw_only=True):
    """How a future ended: the `kind` of failure and its `message`, empty if it kept every law, and the `steps` that it
    took.

    `digest` is that of its last state, 0 if it failed; `events` are its own, kept only if it failed.
    """

    seed: int
    steps: int
    kind: str
    message: str
    digest: int
    events: tuple[AnyEvent, ...] = ()


class Predicated(Exception):
    """A user's predicate is true."""


def future_of(state: State, seed: int, options: FutureOptions, predicate: Predicate | None = None) -> Future:
    """One future of a state. It ends after its steps, at its first failure, or when no request lives and none will
    arrive."""
    course = _Course(state, seed, options, predicate)
    kind = message = ""
    try:
        course.run()
    except Exception as error:  # every failure is a result
        kind = "predicate" if isinstance(error, Predicated) else kind_of(error)
        message = f"{type(error).__name__}: {error}"
        course.events += course.engine.take().events  # the last of them broke the engine
    return Future(
        seed=seed, steps=course.steps, kind=kind, message=message, digest=0 if kind else digest(course.state),
        events=tuple(course.all_events()) if kind else (),
    )  # fmt: skip


class _Course:
    """One future in progress. Mutable."""

    def __init__(self, state: State, seed: int, options: FutureOptions, predicate: Predicate | None) -> None:
        self.engine, self.steps = Engine(private_copy(state), _sources(state.config)), 0
        self.events: list[AnyEvent | Turns] = []
        self._rng, self._options, self._predicate = Rng(seed).fork(), options, predicate
        count = max(SAMPLES, state.config.max_num_seqs)
        self._samples, self._drawn = _tokens(self._rng.word(), state.config.vocab_size or VOCAB_SIZE, count).tobytes(), 0
        self._view, self._turns = memoryview(self._samples), 0
        self._arrival_at = self._gap(options.arrivals_per_mille if options.arrivals else 0)
        self._abort_at = self._gap(options.aborts_per_mille)
        self._reset_at = self._gap(options.resets_per_mille)
        if state.paused:
            self._fold(EnginePaused(mode=""))  # each future goes on

    @property
    def state(self) -> State:
        return self.engine.state

    def all_events(self) -> Iterator[AnyEvent]:
        """The events so far, those of turns too."""
        for each in self.events:
            yield from each.events() if isinstance(each, Turns) else (each,)

    def run(self) -> None:
        options = self._options
        while self.steps < options.steps:
            self._meet()
            self._turns += 1
            if not (alone := self._is_alone) and self._goes_on():
                continue
            is_new = alone
            while self.steps < options.steps and self._plans():
                is_new = True
            if self.state.in_flight:
                if not (is_new and self._goes_on()):
                    self._fold(self._sampled())
            elif self.state.requests:
                raise LawBroken("S6", f"{len(self.state.requests)} requests live, nothing runs and nothing is planned")
            elif not options.arrivals or not options.arrivals_per_mille:
                break
            else:
                self._turns = max(self._turns, self._arrival_at)  # an idle engine waits for the next arrival
        check(self.state)

    def _plans(self) -> bool:
        """Whether there is a next plan. Adapters that it waits for are loaded at once, and pins yield."""
        plan = None
        for ready in self.engine.turn():
            self._take(ready)
            plan = ready.plan
        return plan is not None

    def _meet(self) -> None:
        """Take the outside events before the next decision."""
        options, now = self._options, self._turns
        if now >= self._arrival_at:
            self._arrive()
            self._arrival_at = now + self._gap(options.arrivals_per_mille)
        if now >= self._abort_at:
            self._abort_at = now + self._gap(options.aborts_per_mille)
            live = [*self.state.rows.id.tolist(), *(entry.id for entry in self.state.waiting)]
            if live:
                self._fold(RequestAborted(ids=(self._rng.choose(live),), reason="client"))
        if now >= self._reset_at:
            self._reset_at = now + self._gap(options.resets_per_mille)
            self._fold(PrefixCacheReset())

    def _gap(self, per_mille: int) -> int:
        """Turns until the next event of this rate, at least one, distributed as if each turn were drawn separately."""
        if per_mille <= 0:
            return NEVER
        if per_mille >= PER_MILLE:
            return 1
        uniform = (self._rng.word() + 1) / (WORD + 1)
        return 1 + int(math.log(uniform) / math.log1p(-per_mille / PER_MILLE))

    def _arrive(self) -> None:
        again = replace(self._rng.choose(self._options.arrivals), id=self.state.next_id, name=str(self.state.next_id))
        if refusal(self.state.config, again) is None:
            self._fold(again)

    def _sampled(self) -> StepCommitted:
        """Tokens for the oldest step: the next ones, restarting from the first if there are too few. Of each request's
        drafts some are kept."""
        scheduled = self.state.in_flight[0]
        count, more = scheduled.samples.tobytes().count(1), {}
        if scheduled.drafts is not None and scheduled.drafts.any():
            drafted = bytes(scheduled.drafts[scheduled.samples].tolist())
            counts = bytes(1 + self._rng.below(most + 1) for most in drafted)
            count, more = sum(counts), {"counts": counts, "drafted": drafted}
        return StepCommitted(step=scheduled.step, tokens=self._draw(count), **more)

    def _draw(self, count: int) -> bytes:
        first = 0 if self._drawn + 4 * count > len(self._samples) else self._drawn
        self._drawn = first + 4 * count
        return self._samples[first : self._drawn]

    def _goes_on(self) -> bool:
        """Take steady turns, as long as nothing comes from outside, each a commit with its plan; the plan that is due comes before
        them, and behind them the commit before what comes. Whether they have got so far."""
        until, alone, ended = min(self._arrival_at, self._abort_at, self._reset_at), self._is_alone, False
        while not ended:
            leads = len(self.state.in_flight) < self.state.config.pipeline_depth
            left = max(min(until - self._turns, self._options.steps - 1 - self.steps - leads), 0)
            most = min(left, self._turns_to_check(), 1 if alone else left)
            if self._predicate is not None or (leads and (alone or self.steps == self._options.steps)):
                return False
            if (turns := self.engine.go_on(self._view[self._drawn :], most, most == left and not alone)) is None:
                return False
            self.events.append(turns)
            self._drawn += 4 * sum(turns.counts)
            self._check_all(len(turns.counts) + turns.plans)
            self.steps += turns.plans
            if alone:
                return True
            self._turns += len(turns.counts) - turns.ended
            ended = turns.ended
            if turns.plans < leads + most and not ended:
                return False  # the next commit is left to the reducer
        return True

    @property
    def _is_alone(self) -> bool:
        """Whether an adapter or an input may come before each commit."""
        return bool(self.state.slots or self.state.config.input_units)

    def _turns_to_check(self) -> int:
        """The turns up to the next check of all laws."""
        return -(-(ALL_LAWS_EVENTS - self.state.sequence % ALL_LAWS_EVENTS) // 2)

    def _fold(self, event: AnyEvent) -> None:
        if self._predicate is None:
            self.events.append(event)  # first: an event that breaks the engine is its last
            self.engine.fold_untold(event)
            return self._check_all(1)
        self.engine.fold(event)
        self._take(self.engine.take())

    def _take(self, ready: Ready) -> None:
        self.events += ready.events
        self._check_all(len(ready.events))
        before, event = ready.befores[0], ready.events[0]
        if self._predicate is not None and self._predicate(before, event, ready.state):
            raise Predicated(f"the predicate holds after event {before.sequence}")
        self.steps += plan_of(ready.events[-1]) is not None

    def _check_all(self, count: int) -> None:
        """Check all laws where they are due among the last `count` events."""
        if self.state.sequence % ALL_LAWS_EVENTS < count:
            check(self.state)


def _sources(config: SchedulerConfig) -> list[Source]:
    """The sources that can have events under these settings."""
    return [*[LoadsAtOnce()] * bool(config.max_loras), *[Yields()] * bool(config.pinned_pages_max)]


def _tokens(seed: int, vocab: int, count: int) -> np.ndarray:
    """Token ids (int32[count]) of one seed: the draws of `Rng(seed)`, all at once."""
    word = np.uint64
    value = np.arange(1, count + 1, dtype=word) * word(STRIDE) + word(seed)
    value = (value ^ (value >> word(30))) * word(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> word(27))) * word(0x94D049BB133111EB)
    return ((value ^ (value >> word(31))) % word(vocab)).astype("<i4")


def future_options(log: Log, steps: int, aborts_per_mille: int, resets_per_mille: int) -> FutureOptions:
    """Futures that continue like the log: its first ARRIVALS_MAX requests, at the rate of their arrivals."""
    arrivals: list[RequestArrived] = []
    commits = 0
    for item in log.items():
        if isinstance(item, Frame):
            arrivals += [event for event in item.events if isinstance(event, RequestArrived)]
            commits += sum(isinstance(event, StepCommitted) for event in item.events)
            if len(arrivals) >= ARRIVALS_MAX:
                break
    rate = min(PER_MILLE, -(-PER_MILLE * len(arrivals) // max(commits, 1)))
    return FutureOptions(
        steps=steps, arrivals=tuple(arrivals), arrivals_per_mille=rate, aborts_per_mille=aborts_per_mille,
        resets_per_mille=resets_per_mille,
    )  # fmt: skip
