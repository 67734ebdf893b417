"""Forking: other futures of a logged state, each from a seed.

Owns one future: arrivals like the log's own at the log's own rate, aborts and resets, samples of chance, and every decision
by the engine's own scheduler. A state is a value, so a future costs its own steps and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from vnext.replay.retold import Predicate
from vnext.sched.schedule import schedule
from vnext.sched.sim.chance import Chance
from vnext.sched.sim.judge import kind_of
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.laws import check, check_cheap
from vnext.state.reduce import reduce
from vnext.state.refusal import refusal
from vnext.state.state import State

ALL_LAWS_EVENTS = 256
"""Events between two checks of all laws; the cheap ones are asked after every event, all of them at the end too."""
PER_MILLE = 1000
VOCAB_SIZE = 256
"""Where a log does not tell its vocabulary."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a future is like. `arrivals_per_mille` steps bring a request, of which any is one of the log's `arrivals`;
    `aborts_per_mille` end one, `resets_per_mille` forget the prefix cache. `steps` it lasts at most."""

    steps: int
    arrivals: tuple[RequestArrived, ...]
    arrivals_per_mille: int
    aborts_per_mille: int
    resets_per_mille: int


class Future(msgspec.Struct, frozen=True, kw_only=True):
    """How a future ended: `kind` of failure and its `message`, empty if it kept every law; `steps` that it took.

    `events` are its own, kept only where it failed.
    """

    seed: int
    steps: int
    kind: str
    message: str
    events: tuple[AnyEvent, ...] = ()


class Predicated(Exception):
    """A predicate of one's own is true."""


def future_of(state: State, seed: int, wishes: Wishes, predicate: Predicate | None = None) -> Future:
    """One future of a state. It ends with its steps, at its first failure, or when nobody is left and nobody comes."""
    course = _Course(state, seed, wishes, predicate)
    try:
        course.run()
    except Exception as error:  # any failure of any kind is what a future is asked for
        kind = "predicate" if isinstance(error, Predicated) else kind_of(error)
        return Future(
            seed=seed, steps=course.steps, kind=kind, message=f"{type(error).__name__}: {error}", events=tuple(course.events)
        )
    return Future(seed=seed, steps=course.steps, kind="", message="")


class _Course:
    """One future while it happens. Mutable."""

    def __init__(self, state: State, seed: int, wishes: Wishes, predicate: Predicate | None) -> None:
        self.state, self.steps = state, 0
        self.events: list[AnyEvent] = []
        self._chance, self._wishes, self._predicate = Chance(seed).fork(), wishes, predicate
        self._vocab = state.config.vocab_size or VOCAB_SIZE

    def run(self) -> None:
        wishes = self._wishes
        while self.steps < wishes.steps:
            self._meet()
            while (plan := schedule(self.state)) is not None:
                self._fold(plan)
                self.steps += 1
            if self.state.flights:
                self._commit()
            elif self.state.requests:
                raise LawBroken("S6", f"{len(self.state.requests)} requests live, nothing runs and nothing is planned")
            elif not wishes.arrivals or not wishes.arrivals_per_mille:
                break
            else:
                self._arrive()  # an idle engine waits for whoever comes next
        check(self.state)

    def _meet(self) -> None:
        """What comes from outside before the next decision: one draw for each kind."""
        chance, wishes = self._chance, self._wishes
        drawn = chance.word()
        if wishes.arrivals and drawn % PER_MILLE < wishes.arrivals_per_mille:
            self._arrive()
        if (drawn >> 16) % PER_MILLE < wishes.aborts_per_mille and self.state.requests:
            live = [*self.state.rows.id.tolist(), *(entry.id for entry in self.state.waiting)]
            self._fold(RequestAborted(ids=(chance.choose(live),), reason="client"))
        if (drawn >> 32) % PER_MILLE < wishes.resets_per_mille:
            self._fold(PrefixCacheReset())

    def _arrive(self) -> None:
        again = replace(self._chance.choose(self._wishes.arrivals), id=self.state.next_id, name=str(self.state.next_id))
        if refusal(self.state.config, again) is None:
            self._fold(again)

    def _commit(self) -> None:
        flight = self.state.flights[0]
        word, vocab = self._chance.word(), self._vocab
        tokens = [(word >> place % 32) % vocab for place in range(int(flight.samples.sum()))]
        self._fold(StepCommitted(step=flight.step, tokens=pack_tokens(tokens)))

    def _fold(self, event: AnyEvent) -> None:
        before = self.state
        self.events.append(event)
        self.state = after = reduce(before, event)
        (check if after.sequence % ALL_LAWS_EVENTS == 0 else check_cheap)(after)
        if self._predicate is not None and self._predicate(before, event, after):
            raise Predicated(f"the predicate holds after event {before.sequence}")


def wishes_of(events: Sequence[AnyEvent], steps: int, aborts_per_mille: int, resets_per_mille: int) -> Wishes:
    """Futures that go on as the log did: its requests, at its rate."""
    arrivals = tuple(event for event in events if isinstance(event, RequestArrived))
    commits = sum(isinstance(event, StepCommitted) for event in events)
    rate = min(PER_MILLE, -(-PER_MILLE * len(arrivals) // max(commits, 1)))
    return Wishes(
        steps=steps, arrivals=arrivals, arrivals_per_mille=rate, aborts_per_mille=aborts_per_mille,
        resets_per_mille=resets_per_mille,
    )  # fmt: skip
