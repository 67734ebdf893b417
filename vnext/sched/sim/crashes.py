"""Crashes: a story again and again, each time with a crash after another one of its events.

Owns the place of a crash. The story's own deaths are off; its other faults are as drawn. Each time all laws are checked
and every client's answer is compared with the model's and with that of the engine that nothing disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping

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


class Crashes(msgspec.Struct, frozen=True):
    """What was done to one story: crashes by kind, and the events folded in all runs, the undisturbed one included."""

    events: int
    crashes: tuple[int, ...]


class CrashFailed(Exception):
    """A story that crashes there fails; `simulation` is its state at the failure."""

    def __init__(self, seed: int, clients: int, after: int, kind: Kind, simulation: Simulation, error: Exception) -> None:
        where = f"seed {seed} with {clients} clients fails where {kind.name} die after event {after}"
        super().__init__(f"{where}: {type(error).__name__}: {error}")
        self.simulation, self.error = simulation, error


class Crashing(Simulation):
    """A simulation that crashes after its event number `after`, from 1 on."""

    def __init__(self, drawn: Scenario, after: int, kind: Kind) -> None:
        self._left, self._times, self._kind = after, kind.times, kind
        super().__init__(drawn)

    def _perhaps_die(self) -> None:
        self._left -= 1
        if self._left or not self._times:
            return
        self._times, self._left = self._times - 1, 1
        if self._kind.is_core:
            raise CoreDied
        self._replace_ranks()


def crash_everywhere(seed: int, clients: int) -> Crashes:
    """A crash after every event of a seed's story, of one kind after the other. Raises CrashFailed."""
    drawn = scenario(seed, clients)
    drawn = replace(drawn, faults=replace(drawn.faults, deaths=0))
    with Form(seed):
        calm = Simulation(drawn)
        calm.run_and_require_all()
        events, counts, right = calm.event_count, [0] * len(KINDS), calm.outcome().answers
        for after in range(1, calm.event_count + 1):
            place = (seed + after) % len(KINDS)
            crashing = Crashing(drawn, after, KINDS[place])
            try:
                crashing.run_and_require_all()
                require_alike(right, crashing.outcome().answers)
            except Exception as error:  # any failure of any kind is a finding
                raise CrashFailed(seed, clients, after, KINDS[place], crashing, error) from error
            events, counts[place] = events + crashing.event_count, counts[place] + crashing.deaths
    return Crashes(events, tuple(counts))


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
