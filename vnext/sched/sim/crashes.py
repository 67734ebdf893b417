"""Crashes: a story again and again, each time with a crash after another one of its events.

Owns the place of a crash. The story's own deaths are off; its other faults are as drawn. Each time all laws are checked
and every client's answer is compared with the model's and with that of the engine that nothing disturbed. Copies of the process
may crash in its place, so that what comes before a crash is simulated once for all crashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn, Protocol

import msgspec
from msgspec.structs import replace

from vnext.sched.sim.checks.errors import Divergence
from vnext.sched.sim.scenario import Scenario
from vnext.sched.sim.scenario_draw import scenario
from vnext.sched.sim.seeds import Form
from vnext.sched.sim.simulator import CoreDied, Simulation
from vnext.sched.sim.toy import Answer


class Kind(msgspec.Struct, frozen=True):
    """Who dies, and how often: the second time behind the first event after the first recovery."""

    name: str
    is_core: bool
    times: int


KINDS = (
    Kind("the ranks", False, 1), Kind("the engine core", True, 1),
    Kind("the ranks, and their successors", False, 2), Kind("the engine core, and its successor", True, 2),
)  # fmt: skip
FEW = 24
"""A copy of a process costs about as much as so many events."""


class Crashes(msgspec.Struct, frozen=True):
    """What was done to one story: the events of all runs, the undisturbed one included; how many were folded, fewer where copies
    share those before a crash; crashes by kind."""

    events: int
    folded: int
    crashes: tuple[int, ...]


class Ran(msgspec.Struct, frozen=True):
    """The end of a run that crashed: its events, those of them that were folded for it alone, and its crashes; or how it failed."""

    events: int = 0
    folded: int = 0
    crashes: int = 0
    failure: str = ""


class Copier(Protocol):
    """Copies this process, with everything in it."""

    def copied(self) -> Ran | None:
        """None in the copy, which goes on from here; here, which waits for it, what the copy has ended with."""
        ...

    def end(self, ran: Ran) -> NoReturn:
        """End the copy."""
        ...


class CrashFailed(Exception):
    """A story that crashes there fails; `simulation` is its state at the failure."""

    def __init__(self, seed: int, clients: int, after: int, kind: Kind, simulation: Simulation, error: Exception) -> None:
        where = f"seed {seed} with {clients} clients fails where {kind.name} die after event {after}"
        super().__init__(f"{where}: {type(error).__name__}: {error}")
        self.simulation, self.error = simulation, error


class Crashing(Simulation):
    """A simulation that crashes after its event number `after`, from 1 on; never for 0. `places` counts the events so far after
    which it might: all but those of a disk that opens."""

    def __init__(self, drawn: Scenario, after: int = 0, kind: Kind = KINDS[0]) -> None:
        self.places, self._next, self._times, self._kind = 0, after, kind.times, kind
        super().__init__(drawn)

    def _perhaps_die(self) -> None:
        self.places += 1
        if self.places == self._next:
            self._die()

    def _die(self) -> None:
        self._times -= 1
        self._next = self.places + 1 if self._times else 0
        if self._kind.is_core:
            raise CoreDied
        self._replace_ranks()


class Branching(Crashing):
    """A simulation of which a copy crashes after each event behind the first `few`, while it goes on. `ended`: the ends of the
    copies, in order. `shared`: in a copy, the events before it; -1 where it is none."""

    def __init__(self, drawn: Scenario, seed: int, copier: Copier, few: int) -> None:
        self._seed, self._copier, self._few = seed, copier, few
        self.ended, self.shared = list[Ran](), -1
        super().__init__(drawn)

    def _perhaps_die(self) -> None:
        super()._perhaps_die()
        if self.shared >= 0 or self.places <= self._few:
            return
        if (ran := self._copier.copied()) is not None:
            self.ended.append(ran)
            return
        self.shared, self._kind = self.event_count, kind_after(self._seed, self.places)
        self._times = self._kind.times
        self._die()


class Story(NamedTuple):
    """A seed's story without deaths, and the answers of the engine that nothing disturbs."""

    seed: int
    clients: int
    drawn: Scenario
    right: Mapping[int, Answer]

    def crashed(self, after: int) -> Ran:
        """Crash after this event, from the story's beginning. Raises CrashFailed."""
        kind = kind_after(self.seed, after)
        simulation = Crashing(self.drawn, after, kind)
        try:
            return self.checked(simulation)
        except Exception as error:  # any failure of any kind is a finding
            raise CrashFailed(self.seed, self.clients, after, kind, simulation, error) from error

    def branched(self, copier: Copier, few: int) -> list[Ran]:
        """The ends of copies that crash, one after each event behind the first `few`."""
        simulation = Branching(self.drawn, self.seed, copier, few)
        try:
            ran = self.checked(simulation)
        except BaseException as error:  # no error of a copy may go on as if it were here
            if simulation.shared < 0:
                raise
            ran = Ran(failure=f"{type(error).__name__}: {error}")
        if simulation.shared >= 0:
            copier.end(msgspec.structs.replace(ran, folded=ran.events - simulation.shared))
        return simulation.ended

    def checked(self, simulation: Simulation) -> Ran:
        """Run it to its end, under all laws; require the right answers."""
        simulation.run_and_require_all()
        require_alike(self.right, simulation.outcome().answers)
        return Ran(simulation.event_count, simulation.event_count, simulation.deaths)


def kind_after(seed: int, after: int) -> Kind:
    """Of the crash after this event of a seed's story: one kind after the other."""
    return KINDS[(seed + after) % len(KINDS)]


def crash_everywhere(seed: int, clients: int, copier: Copier | None = None, few: int = FEW) -> Crashes:
    """A crash after every event of a seed's story: in copies that a `copier` makes there, or from the story's beginning, as after
    its first `few` events. Raises CrashFailed."""
    drawn = scenario(seed, clients)
    drawn = replace(drawn, faults=replace(drawn.faults, deaths=0))
    with Form(seed):
        calm = Crashing(drawn)
        calm.run_and_require_all()
        story, places = Story(seed, clients, drawn, calm.outcome().answers), range(1, calm.places + 1)
        copied = copier is not None and calm.places > few
        ends = list(map(story.crashed, places[:few] if copied else places))
        if copier is not None and copied:
            ends += story.branched(copier, few)
        for after, ran in enumerate(ends, 1):
            if ran.failure:  # of a copy: once more, for the error itself
                story.crashed(after)
                raise Divergence(f"seed {seed} fails in a copy after event {after}, and not from its beginning: {ran.failure}")
    counts = dict.fromkeys(KINDS, 0)
    for after, ran in zip(places, ends, strict=True):
        counts[kind_after(seed, after)] += ran.crashes
    events, folded = (calm.event_count + sum(getattr(ran, name) for ran in ends) for name in ("events", "folded"))
    return Crashes(events, folded + (calm.event_count if copied else 0), tuple(counts.values()))


def require_alike(right: Mapping[int, Answer], got: Mapping[int, Answer]) -> None:
    """Require the same answers; of one that somebody cut off, here or there, that one begins with the other."""
    if right.keys() != got.keys():
        raise Divergence(f"C5: clients {sorted(right.keys() ^ got.keys())} have an answer on one side only")
    for number, answer in got.items():
        there = right[number]
        shared = min(len(there.tokens), len(answer.tokens))
        is_cut = "abort" in (there.finish, answer.finish)
        if there.tokens[:shared] != answer.tokens[:shared] or (not is_cut and there != answer):
            raise Divergence(f"C5: client {number} was answered {answer} where undisturbed it gets {there}")
