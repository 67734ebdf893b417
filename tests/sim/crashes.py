"""Crashes: a story again and again, each time with a crash after another one of its events.

Owns the stories and the place of a crash. The story's own deaths are off; its other faults are as drawn. Each time all laws are
checked and every client's answer is compared with the model's and with that of the engine that nothing disturbed. A copy of the
simulation crashes in its place (copying.py), so that what comes before a crash is simulated, and its laws are checked, once for all
crashes; the plain form, `crashed`, begins each time at the story's beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tests.sim.copying import copy_of
from tests.sim.scenario import Client, Scenario
from tests.sim.scenario_draw import scenario
from tests.sim.seeds import Form
from tests.sim.simulator import CoreDied, Simulation
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.toy import Answer
from vnext.state.digest import digest


class Kind(msgspec.Struct, frozen=True):
    """Who dies, and how often: the second time behind the first event after the first recovery."""

    name: str
    is_core: bool
    times: int


KINDS = (
    Kind("the ranks", False, 1), Kind("the engine core", True, 1),
    Kind("the ranks, and their successors", False, 2), Kind("the engine core, and its successor", True, 2),
)  # fmt: skip
LONG_SEEDS = 16
"""One in so many stories is as long as it was drawn; the work grows with the square of a story's length."""
SHORT_CLIENTS, SHORT_PROMPT, SHORT_TOKENS, SHORT_RESETS = 2, 8, 4, 2


class Crashes(msgspec.Struct, frozen=True):
    """What was done to one story: the events of all runs, the undisturbed one included; how many were folded, fewer where copies
    share those before a crash; crashes by kind."""

    events: int
    folded: int
    crashes: tuple[int, ...]


class Ran(msgspec.Struct, frozen=True):
    """The end of a run that crashed: its events, those of them that were folded for it alone, its crashes, the digest of its last
    state and its answers; or how it failed."""

    events: int = 0
    folded: int = 0
    crashes: int = 0
    digest: int = 0
    answers: dict[int, Answer] = {}
    failure: Exception | None = None


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
        self.places = 0
        self.crash_after(after, kind)
        super().__init__(drawn)

    def crash_after(self, after: int, kind: Kind) -> None:
        self._next, self._times, self._kind = after, kind.times, kind

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
    """A simulation of which copies crash, one after each event until one fails. `ended`: their ends, in order.

    A copy is of the moment before the one in which it crashes, since the engine core is in the middle of something when it does:
    the events of that moment are folded once more."""

    def __init__(self, drawn: Scenario, seed: int) -> None:
        self._seed, self.ended = seed, list[Ran]()
        self._is_copy = False
        super().__init__(drawn)

    def _iterate(self) -> None:
        if self._is_copy:
            return super()._iterate()
        before = copy_of(self)
        before._is_copy = True
        super()._iterate()
        for after in range(before.places + 1, self.places + 1):
            if self.ended and self.ended[-1].failure is not None:
                return
            branch = copy_of(before) if after < self.places else before
            branch.crash_after(after, kind_after(self._seed, after))
            self.ended.append(ran(branch, branch.event_count))


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
        end = self.judged(ran(simulation, 0))
        if end.failure is not None:
            raise CrashFailed(self.seed, self.clients, after, kind, simulation, end.failure) from end.failure
        return end

    def judged(self, end: Ran) -> Ran:
        """The same end; a failure where its answers are not right."""
        try:
            if end.failure is None:
                require_alike(self.right, end.answers)
        except Divergence as error:
            return replace(end, failure=error)
        return end


def ran(simulation: Simulation, shared: int) -> Ran:
    """Run it to its end, under all laws. `shared`: its events so far."""
    try:
        simulation.run_and_require_all()
    except Exception as error:  # any failure of any kind is a finding
        return Ran(failure=error)
    events, answers = simulation.event_count, simulation.outcome().answers
    return Ran(events, events - shared, simulation.deaths, digest(simulation.state), answers)


def kind_after(seed: int, after: int) -> Kind:
    """Of the crash after this event of a seed's story: one kind after the other."""
    return KINDS[(seed + after) % len(KINDS)]


def story_of(seed: int, clients: int) -> Scenario:
    """What a seed's crashes happen to: its scenario without deaths, most of them with a few short requests of it."""
    drawn = scenario(seed, clients)
    drawn = replace(drawn, faults=replace(drawn.faults, deaths=0))
    if seed % LONG_SEEDS == 0:
        return drawn
    few = tuple(map(shortened, drawn.clients[:SHORT_CLIENTS]))
    return replace(drawn, clients=few, reset_us=drawn.reset_us[:SHORT_RESETS], weights=drawn.weights[:SHORT_RESETS])


def shortened(client: Client) -> Client:
    """The beginning of its prompt, and of its answer."""
    sampling = client.sampling
    most = min(sampling.max_tokens, SHORT_TOKENS)
    fewer = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
    return replace(client, prompt=client.prompt[:SHORT_PROMPT], sampling=fewer)


def crash_everywhere(seed: int, clients: int, from_the_beginning: bool = False) -> Crashes:
    """A crash after every event of a seed's story: in copies, or from the story's beginning, as of those that write a log. Raises
    CrashFailed."""
    drawn = story_of(seed, clients)
    with Form(seed):
        is_branched = not (from_the_beginning or drawn.faults.logged)
        calm = Branching(drawn, seed) if is_branched else Crashing(drawn)
        calm.run_and_require_all()
        story, places = Story(seed, clients, drawn, calm.outcome().answers), range(1, calm.places + 1)
        if isinstance(calm, Branching):
            ends = list(map(story.judged, calm.ended))
        else:
            ends = list(map(story.crashed, places))
        for after, end in enumerate(ends, 1):
            if end.failure is not None:  # of a copy: once more, for the simulation itself
                story.crashed(after)
                raise Divergence(f"seed {seed} fails in a copy after event {after}, and not from its beginning") from end.failure
    counts = dict.fromkeys(KINDS, 0)
    for after, end in zip(places, ends, strict=True):
        counts[kind_after(seed, after)] += end.crashes
    events, folded = (calm.event_count + sum(getattr(end, name) for end in ends) for name in ("events", "folded"))
    return Crashes(events, folded, tuple(counts.values()))


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
