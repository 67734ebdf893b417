"""Seeds: all that a seed stands for, and what is left of a seed that fails.

A seed is a scenario and the form of the engine in which it runs: every other one with arenas of a few places, so that
histories and tables move every few steps, and one of four with the plain forms of what is compiled.
"""

from __future__ import annotations

import msgspec

from vnext.sched.sim.judge import failing_like, fewer_clients, judge, kind_of, told, toy_voice
from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.shrink import shrink
from vnext.sched.sim.simulator import Simulation
from vnext.state import admitting, columns, columns_numpy, log_forms, log_plain, names, names_plain, reduce as reducer
from vnext.state.events import AnyEvent

SMALL_ARENA_PLACES = 8
SMALL_TOKENS_SPARE = 1


class SeedFailed(Exception):
    """A scenario failed; `simulation` is as far as it came."""

    def __init__(self, seed: int, client_count: int, simulation: Simulation, error: Exception) -> None:
        super().__init__(f"run_seed({seed}, {client_count}) fails with {type(error).__name__}: {error}")
        self.seed, self.simulation, self.error = seed, simulation, error


class Explanation(msgspec.Struct, frozen=True):
    """A failure made small: the events that are left, one line for each, and how they fail."""

    events: tuple[AnyEvent, ...]
    lines: tuple[str, ...]
    message: str


def run_seed(seed: int, client_count: int = 60) -> Simulation:
    """The simulation of a seed, with every law. Raises SeedFailed."""
    with Form(seed):
        simulation = Simulation(scenario(seed, client_count))
        try:
            simulation.run_and_require_all()
        except Exception as error:  # any failure of any kind is a finding: its seed is what matters
            raise SeedFailed(seed, client_count, simulation, error) from error
    return simulation


class Form:
    """The engine in the form that a seed stands for, inside a `with` block of this process."""

    def __init__(self, seed: int) -> None:
        self.small_arenas, self.plain = seed % 2 == 1, seed % 8 in (4, 5)
        self._before = (0, 0, columns.kernels, log_forms.kernels, names.kernels)

    def __enter__(self) -> None:
        self._before = (
            reducer.ARENA_PLACES_MIN, admitting.TOKENS_SPARE, columns.kernels, log_forms.kernels, names.kernels
        )  # fmt: skip
        if self.small_arenas:
            reducer.ARENA_PLACES_MIN, admitting.TOKENS_SPARE = SMALL_ARENA_PLACES, SMALL_TOKENS_SPARE
        if self.plain:
            columns.kernels, log_forms.kernels, names.kernels = columns_numpy, log_plain, names_plain

    def __exit__(self, *raised: object) -> None:
        reducer.ARENA_PLACES_MIN, admitting.TOKENS_SPARE = self._before[:2]
        columns.kernels, log_forms.kernels, names.kernels = self._before[2:]


def explained(failed: SeedFailed) -> Explanation:
    """The failure made small: its events, or, where only clocks, transport or a second rank show it, its scenario."""
    simulation = failed.simulation
    with Form(failed.seed):
        finding = judge(simulation.events)
        if finding is not None:
            voice = toy_voice(simulation.scenario.config.vocab_size)
            small = shrink(simulation.events, failing_like(finding.kind), voice)
        else:
            kind = kind_of(failed.error)
            small = fewer_clients(simulation, lambda caught: kind_of(caught) == kind)
        return Explanation(small, tuple(told(small)), str(judge(small) or finding or failed.error))
