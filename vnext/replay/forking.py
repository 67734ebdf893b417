"""Forking: other futures of a logged state, each from a seed.

Owns one future: arrivals like the log's own at the log's own rate, aborts and resets, samples of chance, and every decision
by the engine's own scheduler. A state is a value, so a future costs its own steps and nothing else.

Steady steps between two things that happen are taken in strides (vnext/sched/stride.py), whatever else by `schedule` and
`reduce`. A future that fails is told once more without strides, which gives its events; so is one in COMPARED_EVERY that does
not fail, and both must end in the same state.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.replay.retold import Predicate
from vnext.replay.source import Log
from vnext.sched.schedule import schedule
from vnext.sched.sim.chance import STRIDE, WORD, Chance
from vnext.sched.sim.judge import kind_of
from vnext.sched.stride import Samples, own_copy, stride
from vnext.state.digest import digest
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted, RequestArrived, StepCommitted
from vnext.state.laws import check, check_cheap
from vnext.state.log import Frame
from vnext.state.reduce import reduce
from vnext.state.refusal import refusal
from vnext.state.state import State

ALL_LAWS_EVENTS, ALL_LAWS_EVENTS_IN_STRIDES = 256, 1024
"""Events between two checks of all laws; the cheap ones are asked after every event, all of them at the end too."""
ARRIVALS_MAX = 2_000
"""Requests of a log, its first ones, that say what others are like."""
COMPARED_EVERY = 64
PER_MILLE = 1000
VOCAB_SIZE = 256
"""Where a log does not tell its vocabulary."""
SAMPLES = 1 << 12
NEVER = 1 << 62
TWINS = "strides"
"""The kind of failure of a future that is another one in strides."""


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

    `digest` is its last state's, 0 where it failed; `events` are its own, kept only where it failed.
    """

    seed: int
    steps: int
    kind: str
    message: str
    digest: int
    events: tuple[AnyEvent, ...] = ()


class Predicated(Exception):
    """A predicate of one's own is true."""


def future_of(state: State, seed: int, wishes: Wishes, predicate: Predicate | None = None) -> Future:
    """One future of a state. It ends with its steps, at its first failure, or when nobody is left and nobody comes."""
    plain = predicate is not None or seed % COMPARED_EVERY == 0
    told = _told(_Course(state, seed, wishes, predicate)) if plain else None
    if told is not None and (told.kind or predicate is not None):
        return told
    found = _told(_Course(state, seed, wishes, None, strides=True))
    if told is None and not found.kind:
        return found
    told = told or _told(_Course(state, seed, wishes, None))
    if told.kind or (told.steps, told.digest) == (found.steps, found.digest):
        return told
    message = f"future {seed} ends as {_ending(found)} in strides, and as {_ending(told)} without"
    return replace(told, kind=TWINS, message=message)


def _ending(future: Future) -> str:
    return f"{future.kind or 'right'} after {future.steps} steps with digest {future.digest:016x}"


def _told(course: _Course) -> Future:
    kind = message = ""
    try:
        course.run()
    except Exception as error:  # any failure of any kind is what a future is asked for
        kind = "predicate" if isinstance(error, Predicated) else kind_of(error)
        message = f"{type(error).__name__}: {error}"
    return Future(
        seed=course.seed, steps=course.steps, kind=kind, message=message, digest=0 if kind else digest(course.state),
        events=tuple(course.events) if kind else (),
    )  # fmt: skip


class _Course:
    """One future while it happens. Mutable. In strides it keeps no events."""

    def __init__(
        self, state: State, seed: int, wishes: Wishes, predicate: Predicate | None, strides: bool = False
    ) -> None:
        self.state, self.seed, self.steps = own_copy(state), seed, 0
        self.events: list[AnyEvent] = []
        self._chance, self._wishes, self._predicate, self._strides = Chance(seed).fork(), wishes, predicate, strides
        self._all_laws_events = ALL_LAWS_EVENTS_IN_STRIDES if strides else ALL_LAWS_EVENTS
        count = max(SAMPLES, state.config.running_max)
        self._samples = Samples(_tokens(self._chance.word(), state.config.vocab_size or VOCAB_SIZE, count))
        self._turns = 0
        self._arrival_at = self._gap(wishes.arrivals_per_mille if wishes.arrivals else 0)
        self._abort_at = self._gap(wishes.aborts_per_mille)
        self._reset_at = self._gap(wishes.resets_per_mille)

    def run(self) -> None:
        wishes = self._wishes
        while self.steps < wishes.steps:
            self._meet()
            self._turns += 1
            if self._strides and self._stride():
                continue
            while self.steps < wishes.steps and (plan := schedule(self.state)) is not None:
                self._fold(plan)
                self.steps += 1
            if self.state.flights:
                self._commit(self._samples.draw(int(np.count_nonzero(self.state.flights[0].samples))).tobytes())
            elif self.state.requests:
                raise LawBroken("S6", f"{len(self.state.requests)} requests live, nothing runs and nothing is planned")
            elif not wishes.arrivals or not wishes.arrivals_per_mille:
                break
            else:
                self._turns = max(self._turns, self._arrival_at)  # an idle engine waits for whoever comes next
        check(self.state)

    def _stride(self) -> bool:
        """Steady turns up to the next thing that comes from outside or the next check of all laws; whether there were any."""
        quiet = min(self._arrival_at, self._abort_at, self._reset_at) - self._turns + 1
        before = self.state.sequence
        due = (self._all_laws_events - before % self._all_laws_events + 1) // 2
        strode = stride(self.state, min(quiet, due, self._wishes.steps - self.steps), self._samples)
        self.state = strode.state
        begun = strode.turns + (strode.tokens is not None)
        self.steps += begun
        self._turns += max(begun - 1, 0)
        if strode.tokens is not None:
            self._commit(strode.tokens)
        if before // self._all_laws_events != self.state.sequence // self._all_laws_events:
            check(self.state)
        return begun > 0

    def _meet(self) -> None:
        """What comes from outside before the next decision."""
        wishes, now = self._wishes, self._turns
        if now >= self._arrival_at:
            self._arrive()
            self._arrival_at = now + self._gap(wishes.arrivals_per_mille)
        if now >= self._abort_at:
            self._abort_at = now + self._gap(wishes.aborts_per_mille)
            live = [*self.state.rows.id.tolist(), *(entry.id for entry in self.state.waiting)]
            if live:
                self._fold(RequestAborted(ids=(self._chance.choose(live),), reason="client"))
        if now >= self._reset_at:
            self._reset_at = now + self._gap(wishes.resets_per_mille)
            self._fold(PrefixCacheReset())

    def _gap(self, per_mille: int) -> int:
        """Turns until something happens that happens so often: one or more, drawn as if each turn were asked."""
        if per_mille <= 0:
            return NEVER
        if per_mille >= PER_MILLE:
            return 1
        uniform = (self._chance.word() + 1) / (WORD + 1)
        return 1 + int(math.log(uniform) / math.log1p(-per_mille / PER_MILLE))

    def _arrive(self) -> None:
        again = replace(self._chance.choose(self._wishes.arrivals), id=self.state.next_id, name=str(self.state.next_id))
        if refusal(self.state.config, again) is None:
            self._fold(again)

    def _commit(self, tokens: bytes) -> None:
        self._fold(StepCommitted(step=self.state.flights[0].step, tokens=tokens))

    def _fold(self, event: AnyEvent) -> None:
        before = self.state
        if not self._strides:
            self.events.append(event)
        self.state = after = reduce(before, event)
        (check if after.sequence % self._all_laws_events == 0 else check_cheap)(after)
        if self._predicate is not None and self._predicate(before, event, after):
            raise Predicated(f"the predicate holds after event {before.sequence}")


def _tokens(seed: int, vocab: int, count: int) -> np.ndarray:
    """Token ids (int32[count]) of one seed: the draws of `Chance(seed)`, all at once."""
    word = np.uint64
    value = np.arange(1, count + 1, dtype=word) * word(STRIDE) + word(seed)
    value = (value ^ (value >> word(30))) * word(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> word(27))) * word(0x94D049BB133111EB)
    return ((value ^ (value >> word(31))) % word(vocab)).astype("<i4")


def wishes_of(log: Log, steps: int, aborts_per_mille: int, resets_per_mille: int) -> Wishes:
    """Futures that go on as the log did: its first ARRIVALS_MAX requests, at the rate at which those came."""
    arrivals: list[RequestArrived] = []
    commits = 0
    for item in log.items():
        if isinstance(item, Frame):
            arrivals += [event for event in item.events if isinstance(event, RequestArrived)]
            commits += sum(isinstance(event, StepCommitted) for event in item.events)
            if len(arrivals) >= ARRIVALS_MAX:
                break
    rate = min(PER_MILLE, -(-PER_MILLE * len(arrivals) // max(commits, 1)))
    return Wishes(
        steps=steps, arrivals=tuple(arrivals), arrivals_per_mille=rate, aborts_per_mille=aborts_per_mille,
        resets_per_mille=resets_per_mille,
    )  # fmt: skip
