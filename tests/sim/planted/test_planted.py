"""Bugs planted on purpose: a plain scan of consecutive seeds finds every one of them, soon, and by its law.

Where it did last time is looked at first (seen_before.py); `--rewrite` scans anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import msgspec
import pytest

from planted_adapter_bugs import ADAPTER_BUGS
from planted_client_bugs import CLIENT_BUGS
from planted_compiled_bugs import COMPILED_BUGS
from planted_constraint_bugs import CONSTRAINT_BUGS, FAILING_BUGS, FORCING_BUGS
from planted_draft_bugs import COST_BUGS, DRAFT_BUGS
from planted_edge_bugs import EDGE_BUGS
from planted_microbatch_bugs import MICROBATCH_BUGS
from planted_pin_bugs import PIN_BUGS, PIN_LOSS_BUGS
from planted_recurrent_bugs import DRAFTED_STATE_BUGS, PINNED_STATE_BUGS, RECURRENT_BUGS
from planted_recovery_bugs import CRASH_BUGS, RECOVERY_BUGS
from planted_router_bugs import ROUTER_BUGS
from planted_sched_bugs import DEADLINE_BUGS, SCHED_BUGS
from planted_shortage_bugs import SHORTAGE_BUGS
from planted_state_bugs import INPUT_BUGS, INPUT_LOSS_BUGS, SEARCH_BUGS, SEARCH_LOSS_BUGS, STATE_BUGS
from planted_tier_bugs import PEER_BUGS, STATE_PEER_BUGS, STATE_TIER_BUGS, TIER_BUGS
from planted_weights_bugs import WEIGHTS_BUGS
from planted_window_bugs import WINDOW_BUGS
from planting import (
    blank_arenas, Bug, is_found_by, plain_columns, planted, small_arenas, source_with, swapped, swaps, without_twins,
)  # fmt: skip
from seen_before import SeenBefore
from tests.sim.scenario_draw import (
    changes_weights, constrains, dies, drafts_by_grammar, has_disk, has_microbatches, has_peers, has_pictures, has_states,
    is_interrupted, lacks_memory, retains, scenario, searches, speculates,
)  # fmt: skip
from tests.sim.simulator import Simulation

EVENTS_MAX = 20_000
CLIENTS = 30
"""Requests of a scenario: fewer than in the walk, so that as many events meet more scenarios."""
NEITHER = 2**30
"""What stands where an arena was never written: neither a token nor a block."""


def reads_snapshots(seed: int) -> bool:
    """Whether the model has recurrent layers and the engine a disk tier."""
    return has_disk(seed) and has_states(seed)


def hands_states_over(seed: int) -> bool:
    """Whether the model has recurrent layers and prompts are computed elsewhere."""
    return has_peers(seed) and has_states(seed)


def takes_turns(seed: int) -> bool:
    """Whether clients take turns."""
    return scenario(seed, client_count=CLIENTS).config.policy == "fair"


def has_deadlines(seed: int) -> bool:
    """Whether the earliest deadline goes first."""
    return scenario(seed, client_count=CLIENTS).config.policy.startswith("deadline")


def loses_pins(seed: int) -> bool:
    """Whether ranks die or weights change in a scenario with pins."""
    return retains(seed) and (dies(seed) or changes_weights(seed))


def loses_units(seed: int) -> bool:
    """Whether ranks die in a scenario with inputs."""
    return has_pictures(seed) and dies(seed)


def loses_searches(seed: int) -> bool:
    """Whether ranks die in a scenario in which they look for vectors."""
    return searches(seed) and dies(seed)


def drafts_at_a_price(seed: int) -> bool:
    """Whether the engine speculates, and one more token adds to a step's time."""
    return speculates(seed) and scenario(seed, client_count=CLIENTS).config.speculation.row_cost > 0


def drafts_with_states(seed: int) -> bool:
    """Whether the engine speculates and its model has recurrent layers."""
    return speculates(seed) and has_states(seed)


def pins_states(seed: int) -> bool:
    """Whether requests want their beginnings kept and the model has recurrent layers."""
    return retains(seed) and has_states(seed)


SHOWN = {
    speculates: DRAFT_BUGS, drafts_at_a_price: COST_BUGS, drafts_by_grammar: FORCING_BUGS, constrains: CONSTRAINT_BUGS,
    is_interrupted: FAILING_BUGS, dies: RECOVERY_BUGS, changes_weights: WEIGHTS_BUGS, has_disk: TIER_BUGS, reads_snapshots: STATE_TIER_BUGS, hands_states_over: STATE_PEER_BUGS, has_peers: PEER_BUGS, retains: PIN_BUGS,
    loses_pins: PIN_LOSS_BUGS, has_microbatches: MICROBATCH_BUGS, takes_turns: CLIENT_BUGS, has_deadlines: DEADLINE_BUGS,
    has_states: RECURRENT_BUGS, drafts_with_states: DRAFTED_STATE_BUGS, pins_states: PINNED_STATE_BUGS, has_pictures: INPUT_BUGS,
    lacks_memory: SHORTAGE_BUGS, loses_units: INPUT_LOSS_BUGS, searches: SEARCH_BUGS, loses_searches: SEARCH_LOSS_BUGS,
}  # fmt: skip
"""Which seeds show some faults."""
BUGS = [*STATE_BUGS, *SCHED_BUGS, *EDGE_BUGS, *WINDOW_BUGS, *ADAPTER_BUGS, *(bug for bugs in SHOWN.values() for bug in bugs)]


class Find(msgspec.Struct, frozen=True):
    """The first seed that fails, the events simulated until then, and the failure."""

    seed: int
    events: int
    error: Exception


def hunt(bug: Bug, seeds: Iterable[int], events_max: int = EVENTS_MAX) -> Find | None:
    """Scan these seeds. None if so many events show nothing."""
    with plain_columns(), small_arenas(), blank_arenas(NEITHER), planted(bug), without_twins():
        return first_failure(seeds, events_max)


def first_failure(seeds: Iterable[int], events_max: int) -> Find | None:
    """Of these seeds in the engine as it is now. None if so many events show nothing."""
    events = 0
    for seed in seeds:
        simulation = Simulation(scenario(seed, CLIENTS))
        try:
            simulation.run_and_require_all()
        except Exception as error:  # any failure of any kind is a find
            return Find(seed, events + len(simulation.events), error)
        events += len(simulation.events)
        if events >= events_max:
            return None
    return None


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> SeenBefore:
    return SeenBefore(pytestconfig.getoption("--rewrite"))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, seen: SeenBefore) -> None:
    seeds = seen.seeds("found", bug.name)
    shows = next((shows for shows, bugs in SHOWN.items() if bug in bugs), None)
    found = hunt(bug, filter(shows, seeds) if shows else seeds)
    if found is not None:
        seen.keep("found", bug.name, found.seed, found.events)
    assert found is not None, f"{EVENTS_MAX} events and nobody noticed: a law or a fault is missing"
    assert is_found_by(found.error, bug.found_by), f"seed {found.seed} failed otherwise: {found.error!r}"


def test_without_a_bug_nothing_is_found() -> None:
    nothing = Bug(name="nothing", found_by=())
    assert hunt(nothing, count(), 2_500) is None


def test_planting_leaves_no_trace() -> None:
    changes = swaps(BUGS[0].edits)
    with swapped(changes):
        assert all(function.__code__ is code for function, _, code in changes)
    assert changes and all(function.__code__ is code for function, code, _ in changes)


def test_every_planted_bug_has_its_text_once() -> None:
    """The hunt for them takes some of them a run: code that has changed must not leave one behind."""
    for bug in (*BUGS, *CRASH_BUGS, *ROUTER_BUGS):
        for edits in (bug.edits, bug.one_rank):
            for module in {edit.module for edit in edits}:
                source_with(module, [edit for edit in edits if edit.module == module])


def test_bugs_have_names_of_their_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 40


def test_no_bug_is_found_by_just_any_failure() -> None:
    bugs = [*BUGS, *COMPILED_BUGS]
    assert not [bug.name for bug in bugs if not bug.found_by or {"Error", "Exception", "Illegal"} & set(bug.found_by)]
