"""Seeds: the simulation that a seed identifies, and the reduced failure of a seed that fails.

A seed determines a scenario and the form of the engine that runs it. Every other seed uses arenas of a few places, so
that histories and tables move every few steps and ended requests are soon forgotten. One in four uses the plain forms
in place of the compiled ones.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from tests.sim.scenario import Faults, Scenario
from tests.sim.scenario_draw import scenario
from tests.sim.simulator import Simulation
from vnext.log import log_bytes, log_plain, redaction
from vnext.sim.findings import check_events, failing_like, kind_of, reported, toy_voice
from vnext.sim.shrink import reduced, shrink
from vnext.state import allocate, reduce as reducer
from vnext.state.events import AnyEvent
from vnext.state.store import columns, columns_numpy, prefix_index, prefix_index_plain

SMALL_ARENA_PLACES = 8
SMALL_TOKENS_SPARE = 1
SMALL_SWEEP_MIN = 1


class SeedFailed(Exception):
    """A scenario failed; `simulation` is its state at the failure."""

    def __init__(self, seed: int, client_count: int, simulation: Simulation, error: Exception) -> None:
        super().__init__(f"run_seed({seed}, {client_count}) fails with {type(error).__name__}: {error}")
        self.seed, self.simulation, self.error = seed, simulation, error


class Explanation(msgspec.Struct, frozen=True):
    """A reduced failure: the remaining events, one line for each, and the way in which they fail."""

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
    """A context manager that puts the engine of this process into the form of a seed."""

    def __init__(self, seed: int) -> None:
        self.small_arenas, self.plain = seed % 2 == 1, seed % 8 in (4, 5)
        self._before = (0, 0, 0, columns.impl, log_bytes.impl, prefix_index.impl)

    def __enter__(self) -> None:
        self._before = (
            reducer.ARENA_PLACES_MIN, allocate.TOKENS_SPARE, redaction.SWEEP_MIN,
            columns.impl, log_bytes.impl, prefix_index.impl,
        )  # fmt: skip
        if self.small_arenas:
            reducer.ARENA_PLACES_MIN, allocate.TOKENS_SPARE = SMALL_ARENA_PLACES, SMALL_TOKENS_SPARE
            redaction.SWEEP_MIN = SMALL_SWEEP_MIN
        if self.plain:
            columns.impl, log_bytes.impl, prefix_index.impl = columns_numpy, log_plain, prefix_index_plain

    def __exit__(self, *raised: object) -> None:
        reducer.ARENA_PLACES_MIN, allocate.TOKENS_SPARE, redaction.SWEEP_MIN = self._before[:3]
        columns.impl, log_bytes.impl, prefix_index.impl = self._before[3:]


def explained(failed: SeedFailed) -> Explanation:
    """The failure reduced: to its events, or to its scenario if it needs clocks, transport or a second rank."""
    simulation = failed.simulation
    with Form(failed.seed):
        finding = check_events(simulation.events)
        if finding is not None:
            voice = toy_voice(simulation.scenario.config)
            small = shrink(simulation.events, failing_like(finding.kind), voice)
        else:
            kind = kind_of(failed.error)
            small = fewer_clients(simulation, lambda caught: kind_of(caught) == kind)
        return Explanation(small, tuple(reported(small)), str(check_events(small) or finding or failed.error))


def fewer_clients(simulation: Simulation, same: Callable[[Exception], bool]) -> tuple[AnyEvent, ...]:
    """The events of the smallest scenario that fails in the same way: faults switched off, clients left out."""
    best = simulation
    for changes in ({"faults": Faults()}, {"reset_us": ()}, {"weights": ()}, {"disk": None}):
        best = failed(replace(best.scenario, **changes), same) or best
    scenario = best.scenario
    for clients in reduced(scenario.clients, lambda kept: failed(replace(scenario, clients=kept), same) is not None):
        best = failed(replace(scenario, clients=clients), same) or best
    return tuple(best.events)


def failed(scenario: Scenario, same: Callable[[Exception], bool]) -> Simulation | None:
    """The simulation of a scenario, None unless it fails in the same way."""
    simulation = Simulation(scenario)
    try:
        simulation.run_and_require_all()
    except Exception as error:  # any failure of any kind: the caller knows which it looks for
        return simulation if same(error) else None
    return None
