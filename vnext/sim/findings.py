"""Checking a list of events: find the first failure, and print the list for people.

A list has no clock, transport or second rank, so failures that need those are not found here. Laws, accounting, the
shadow cache, the model's answers and the history are checked after every event.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.log.codec import chained, encode_body, encode_frame, first_header, open_segment
from vnext.sched.schedule import schedule
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.core import Core
from vnext.sim.laws import constraint_laws, decision_laws
from vnext.sim.rank import Rank
from vnext.sim.shrink import Failure, Voice
from vnext.sim.toy import answer, constrained, next_token
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    first_of,
    generated_by,
    plan_of,
    unpack_tokens,
)
from vnext.state.outputs import Output
from vnext.state.reduce import reduce, start
from vnext.state.state import State, StepInFlight
from vnext.state.traits import line_of

HISTORY_EVENTS = 64
HISTORY_EVENTS_SHORT = 4
SHORT = 400


class Finding(msgspec.Struct, frozen=True):
    """A failure: its kind (equal for equal bugs), its message, and the number of events up to it."""

    kind: str
    message: str
    length: int


def kind_of(error: Exception) -> str:
    """The law's name, also where a check names it before its colon; else the message without its numbers."""
    if isinstance(error, LawBroken):
        return error.law
    law, colon, _ = str(error).partition(":")
    if isinstance(error, Divergence) and colon and law[0].isupper() and law[1:].isdigit():
        return law
    words = "".join(letter if letter.isalpha() else " " for letter in str(error)).split()
    return " ".join([type(error).__name__, *words[:4]])


def check_events(events: Sequence[AnyEvent], toy: bool = True) -> Finding | None:
    """The first failure of these events, EngineStarted first; None if there is none.

    `toy`: the toy model sampled the tokens, so its answers and the shadow cache are checked too.
    """
    court = (_ToyChecker if toy else _Checker)(
        first_of(events), HISTORY_EVENTS if len(events) > SHORT else HISTORY_EVENTS_SHORT
    )
    length = 1
    try:
        for length, event in enumerate(events[1:], start=2):  # noqa: B007  reported below
            court.hear(event)
        court.close()
    except Exception as error:  # any failure of any kind is a finding
        return Finding(kind_of(error), f"{type(error).__name__}: {error}", length)
    return None


def failing_like(kind: str, toy: bool = True) -> Failure:
    """The failure that `shrink` looks for: one of this kind."""

    def failure(events: Sequence[AnyEvent]) -> int | None:
        found = check_events(events, toy)
        return found.length if found is not None and found.kind == kind else None

    return failure


def toy_voice(config: SchedulerConfig) -> Voice:
    def voice(arrival: RequestArrived, history: Sequence[int]) -> int:
        wanted = next_token(history, arrival.sampling.seed, config.vocab_size)
        return constrained(config, arrival.sampling, history[len(arrival.prompt) // 4 :], wanted)

    return voice


class _Checker:
    """One hearing of laws, books and the past. Mutable."""

    def __init__(self, started: EngineStarted, history_events: int) -> None:
        self.core = Core(started, history_events)

    def hear(self, event: AnyEvent) -> None:
        before = self.core.seen
        decision = plan if (plan := plan_of(event)) is not None and plan == schedule(before.state) else None
        news = self.core.fold(event)
        if decision is not None:  # another plan was nobody's decision: it may be strange
            decision_laws(before, decision, self.core.seen)
        self.heard(event, news)

    def heard(self, event: AnyEvent, news: tuple[Output, ...]) -> None:
        """What else is asked after an event."""

    def close(self) -> None:
        """The next decision must be a right one, or rightly none; what is still held must be well."""
        self.core.look_back()
        if schedule(self.core.state) is None:
            decision_laws(self.core.seen, None, self.core.seen)


class _ToyChecker(_Checker):
    """The hearing of an engine whose model is the toy."""

    def __init__(self, started: EngineStarted, history_events: int) -> None:
        super().__init__(started, history_events)
        self.rank = Rank(started)

    def heard(self, event: AnyEvent, news: tuple[Output, ...]) -> None:
        self.rank.fold(event, self.core.seen)
        constraint_laws(self.core.state.config, self.core.accounting.entries, news)
        for reported in news:
            self._compare_answer(reported.id)

    def _compare_answer(self, id_: int) -> None:
        """So far, and why it ended, as the model answers to this request alone."""
        entry = self.core.accounting.entries[id_]
        arrival = entry.arrival
        right = answer(self.core.state.config, unpack_tokens(arrival.prompt).tolist(), arrival.sampling)
        heard, fails = tuple(entry.tokens), right.finish == "abort"
        if fails:  # ranks tell the engine core, and a list has none: what follows is nobody's answer
            heard = heard[: len(right.tokens)]
        wrong_end = entry.finish not in ("", "abort") and (entry.finish, len(heard)) != (right.finish, len(right.tokens))
        goes_on = entry.finish == "" and len(heard) >= len(right.tokens)
        if heard != right.tokens[: len(heard)] or not fails and (wrong_end or goes_on):
            raise Divergence(f"request {id_} was answered {entry.tokens} {entry.finish} where alone it gets {right}")


# ---- for people --------------------------------------------------------------------------------------------------


def reported(events: Sequence[AnyEvent]) -> list[str]:
    """One line for each event: what came, what each step computes, what was sampled."""
    started = first_of(events)
    given = [(field.name, getattr(started.config, field.name), field.default) for field in msgspec.structs.fields(started.config)]
    settings = ", ".join(f"{name}={value}" for name, value, default in given if value != default)
    lines, state = [f"   0  started with {settings}"], start(started)
    for number, event in enumerate(events[1:], start=1):
        try:
            state = reduce(state, event)
            words = _words(event, state)
        except Exception as error:  # the last event of a failing list may well raise
            words = f"{event}  <- {type(error).__name__}: {error}"
        lines.append(f"{number:4}  {words}")
    return lines


ASKED = ("seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")


def _words(event: AnyEvent, state: State) -> str:
    if (plan := plan_of(event)) is not None:
        return _planned(plan.step, plan.preempted, state.in_flight[-1])
    match event:
        case RequestArrived():
            asks = {name: getattr(event.sampling, name) for name in ASKED}
            asks |= {"priority": event.priority, "cache_salt": event.cache_salt}
            wishes = ", ".join(f"{name}={value}" for name, value in asks.items() if value)
            has = f" and {unpack_tokens(generated).tolist()}" if (generated := generated_by(event)) else ""
            return f"request {event.id} arrives: prompt {unpack_tokens(event.prompt).tolist()}{has}, {wishes}"
        case StepCommitted():
            return f"step {event.step} is committed: {unpack_tokens(event.tokens).tolist()}"
        case RequestAborted():
            return f"requests {list(event.ids)} leave"
        case EngineRecovered():
            care = f", cautious below request {event.cautious}" if event.cautious else ""
            return f"the ranks are new{care}: {[entry.id for entry in state.waiting]} wait"
    return line_of(event)


def _planned(step: int, preempted: Sequence[int], scheduled: StepInFlight) -> str:
    ends = scheduled.starts + scheduled.counts
    parts = zip(scheduled.ids.tolist(), scheduled.starts.tolist(), ends.tolist(), scheduled.samples.tolist())
    works = ", ".join(f"{id_} [{start}, {end}){' samples' if samples else ''}" for id_, start, end, samples in parts)
    gone = f"; rows {list(preempted)} give way" if preempted else ""
    return f"step {step} is planned: {works}{gone}"


class Tape:
    """A segment that grows by frames. Mutable; `width` bytes a token; `ends` says behind how many bytes how many events
    are whole."""

    def __init__(self, started: EngineStarted, code_version: str) -> None:
        header = first_header(started, "full", code_version)
        data, self._chain = open_segment(header)
        self.width, self._parts = header.token_width, [data]
        self.ends = [(len(data), 1)]

    def write(self, events: Sequence[AnyEvent], after: State) -> None:
        """One frame: an iteration of the engine, and the digest of the state that it left."""
        size, count = self.ends[-1]
        body = encode_body(count, events, (), 0, self.width)
        self._chain = chained(self._chain, digest(after), body)
        self._parts.append(encode_frame(self._chain, body))
        self.ends.append((size + len(self._parts[-1]), count + len(events)))

    def data(self) -> bytes:
        """The segment so far."""
        return b"".join(self._parts)


def segment(events: Sequence[AnyEvent], code_version: str) -> bytes:
    """The events, EngineStarted first, each in a frame of its own. It ends with an event that the reducer refuses."""
    started = first_of(events)
    tape, state = Tape(started, code_version), start(started)
    for event in events[1:]:
        try:
            state, refused = reduce(state, event), False
        except IllegalEvent:
            refused = True
        tape.write((event,), state)
        if refused:
            break
    return tape.data()
