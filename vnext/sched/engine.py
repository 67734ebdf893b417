"""The engine without effects: events in, and out a value that says everything its caller has to do. Pure. The loop:

    for event in arrived():                    requests, aborts, commits: one numbered stream
        state, effects = fold(state, event)
    plan  = schedule(state)
    state, effects = fold(state, plan)         and the same event goes to the log and to every rank

Owns the one true order. It knows no socket, file, clock or rank: the engine core (vnext/runtime/engine/engine_core.py) carries out
what it decides, and the simulator, a hypothetical run and a future of a log drive the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from vnext.sched.encoding import next_encoding
from vnext.sched.schedule import schedule
from vnext.sched.turn import steady_run, steady_turn
from vnext.state.events import AnyEvent, StepCommitted, StepPlanned, plan_of
from vnext.state.fold_commit import MatchedSamples, finish
from vnext.state.laws import check_cheap
from vnext.state.outputs import Going, Output, outputs, outputs_apart
from vnext.state.reduce import fold
from vnext.state.state import State


def unchecked(state: State) -> None:
    """For engines whose states somebody else checks, or that did what a log says."""


class Source(Protocol):
    """A part of an engine that has events of its own. Every turn asks the sources that are on, in their order.

    `is_on`: whether it has anything to do, or to wait for. `goes_out`: whether the event that it returned last is carried out
    before it is asked again. `precedes`, `asks_behind`: whether `precede` and `ask` do anything.
    """

    is_on: bool = True
    goes_out: bool = False
    precedes: ClassVar[bool] = False
    asks_behind: ClassVar[bool] = False

    def next_event(self, state: State) -> AnyEvent | None:
        """The next event; None while there is none or it waits. What it returned before has been folded."""

    def precede(self, state: State, event: AnyEvent) -> AnyEvent | None:
        """The event that comes before one from outside; None for none."""
        return None

    def ask(self, state: State) -> None:
        """Ask for work behind a turn. Everything that has been folded is carried out."""
        return

    def wait_ms(self, state: State) -> int | None:
        """After how long the source is to be asked again at the latest; None for no limit."""
        return None


News = tuple[Going | None, Sequence[Output], object]
"""Of one event: the requests that go on with one token each, the outputs of all others, and the note of the event's caller."""


class Ready(msgspec.Struct, frozen=True, gc=False):
    """What is to be carried out now, in this order: record `events` and the digest of `state`, which is the one behind them; send
    the events to the ranks; send the `news` to clients.

    `befores` are the states before each event (before a plan behind a steady commit: that before both), `matched` what commits
    matched. `plan` is the turn's decision, the last of the events.
    """

    events: Sequence[AnyEvent]
    befores: Sequence[State]
    matched: Sequence[MatchedSamples | None]
    news: Sequence[News]
    state: State
    plan: StepPlanned | None = None


class Turns(NamedTuple):
    """Steady turns: the number of the first commit's step, that of the first plan's, the tokens (int32), how many each commit
    takes, whether a plan alone `leads` them, and whether the last commit `ended` them without one."""

    step: int
    planned: int
    tokens: memoryview
    counts: Sequence[int]
    leads: bool
    ended: bool

    @property
    def plans(self) -> int:
        """How many."""
        return len(self.counts) + self.leads - self.ended

    def events(self) -> Iterator[AnyEvent]:
        drawn = 0
        if self.leads:
            yield StepPlanned(step=self.planned)
        for number, count in enumerate(self.counts):
            yield StepCommitted(step=self.step + number, tokens=bytes(self.tokens[drawn : drawn + 4 * count]))
            if number + self.leads < self.plans:
                yield StepPlanned(step=self.planned + number + self.leads)
            drawn += 4 * count


class Engine:
    """One engine: its newest state, and what has been folded and not been carried out. Mutable."""

    def __init__(
        self, state: State, sources: Sequence[Source] = (), check: Callable[[State], None] = check_cheap
    ) -> None:
        """`check` raises LawBroken where a state breaks a law. Sources that join later neither precede nor ask."""
        self.state = state
        self._sources, self._check = sources, check
        self._preceding = [source for source in sources if source.precedes]
        self._asking = [source for source in sources if source.asks_behind]
        self._events: list[AnyEvent] = []
        self._befores: list[State] = []
        self._matched: list[MatchedSamples | None] = []
        self._news: list[News] = []

    def arrive(self, event: AnyEvent) -> None:
        """Fold an event from outside, behind those that must come before it."""
        for source in self._preceding:
            if (first := source.precede(self.state, event)) is not None:
                self.fold(first)
        self.fold(event)

    def fold(self, event: AnyEvent, note: object = None, apart: bool = True) -> None:
        """Fold one event. `apart`: the news of a commit come in columns, as far as they can. Raises IllegalEvent or LawBroken."""
        before = self.state
        self._events.append(event)  # first: an event that breaks the engine must be in its log
        self._befores.append(before)
        self._matched.append(None)
        self.state, matched = fold(before, event)
        self._matched[-1] = matched
        self._check(self.state)
        if matched is not None and apart:
            going, news = outputs_apart(before, self.state, matched)
            self._news.append((going, news, note))
        elif (news := outputs(before, event, self.state, matched)) or note is not None:
            self._news.append((None, news, note))

    def fold_last(self, event: StepCommitted, note: object = None) -> None:
        """Fold a commit that nothing else follows now, with the plan behind it if both are the usual ones."""
        if self._events or self._check is not check_cheap or (turn := steady_turn(self.state, event)) is None:
            self.fold(event, note)
            return
        before, self.state = self.state, turn.state
        self._events = [event, StepPlanned(step=before.planned)]
        self._befores = [before, before]  # nothing reads the state before such a plan
        self._matched = [turn.matched, None]
        self._news = [(turn.going, (), note)]

    def fold_untold(self, event: AnyEvent) -> None:
        """Fold one event for a caller that records it and needs no news. Raises IllegalEvent or LawBroken."""
        self.state = fold(self.state, event)[0]
        self._check(self.state)

    def go_on(self, tokens: memoryview, most: int, ends: bool = False) -> Turns | None:
        """Fold up to `most` commits that take these tokens, each with the plan behind it, while both are the usual ones, for a
        caller that needs no news, behind the plan that is due; and one commit more if the next ones are not usual, or it `ends`
        them. None, with nothing done, if the first are not."""
        before = self.state
        if len(before.in_flight) < before.config.pipeline_depth and any(
            source.is_on and source.next_event(before) is not None for source in self._sources
        ):
            return None
        if self._events or self._check is not check_cheap or (run := steady_run(before, tokens, most, ends)) is None:
            return None
        turns, self.state = Turns(before.committed, before.planned, tokens, run.counts, run.leads, run.ended), run.state
        if run.gone:
            try:
                self.state = finish(run.state, run.gone, "finished")
                self._check(self.state)
            except Exception:
                self._events += turns.events()  # the last of them broke the engine
                raise
        return turns

    def turn(self) -> Iterator[Ready]:
        """One decision, behind the events of all sources. Each value is to be carried out before the next is asked for; only the
        last of them may have a plan, and another turn may follow it."""
        for source in self._sources:
            if source.is_on:
                while (event := source.next_event(self.state)) is not None:
                    if self._events and plan_of(self._events[-1]) is not None:  # fold_last's: it ends its frame
                        yield self.take()
                    self.fold(event)
                    if source.goes_out:
                        yield self.take()
        while self.state.config.input_units and (event := next_encoding(self.state)) is not None:
            if self._events and plan_of(self._events[-1]) is not None:
                yield self.take()
            self.fold(event)
            yield self.take()
        if (plan := schedule(self.state)) is not None:
            self.fold(plan)
        if self._events:
            yield self.take(plan)
        for source in self._asking:
            if source.is_on:
                source.ask(self.state)

    def take(self, plan: StepPlanned | None = None) -> Ready:
        """What has been folded since the last call."""
        ready = Ready(self._events, self._befores, self._matched, self._news, self.state, plan)
        self._events, self._befores, self._matched, self._news = [], [], [], []
        return ready

    @property
    def has_news(self) -> bool:
        """Whether there is something to be carried out."""
        return bool(self._events)

    def wait_ms(self, result_ms: int) -> int | None:
        """How long to wait for news, None for no limit: at most `result_ms` while a step is in flight."""
        if self.state.in_flight:
            return result_ms
        waits = (source.wait_ms(self.state) for source in self._sources if source.is_on)
        return min((wait_ms for wait_ms in waits if wait_ms is not None), default=None)
