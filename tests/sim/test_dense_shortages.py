"""Dense shortages: memory lacks for several steps in a row, again and again, while everything else goes on that moves rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from tests.sim.scenario import NEVER, Disk, Scenario
from tests.sim.scenario_draw import as_pinned, draw_weights, retaining, scenario, with_own_bounds
from tests.sim.simulator import Simulation
from tests.sim.tier import as_kept, returning
from vnext.sim.rng import Rng
from vnext.state.config import Speculation
from vnext.state.events import (
    BlocksPromoted,
    EnginePaused,
    MemoryRanShort,
    StepCommitted,
    StepLimitRaised,
    StepRewound,
    plan_of,
)

replace = msgspec.structs.replace
HALVES = (range(602, 610), range(610, 618))


def dense(seed: int) -> Scenario:
    """A drawn scenario with prompts in pieces, drafts, priorities, pins, a disk tier and, in half of them, changes of weights, in which a fifth to two
    thirds of the steps lack memory until there were 60 shortages. In every fourth of them pages have windows instead of a disk, and
    no row can go back."""
    rng, drawn = Rng(seed), scenario(seed, client_count=40)
    speculation = Speculation(num_speculative_tokens=rng.between(1, 4), row_cost=rng.choose((0, 0, 30)))
    config = replace(
        drawn.config, chunked_prefill=True, policy="priority", pipeline_depth=rng.between(2, 4), windows=(), state_pages=0,
        page_count=rng.between(12, 40), max_num_batched_tokens=rng.between(6, 24), max_num_seqs=rng.between(3, 8), block_size=rng.choose((1, 2, 4)),
        long_prefill_token_threshold=rng.choose((0, 3)), speculation=speculation,
    )  # fmt: skip
    disk = Disk(capacity=1000, lies=10, hangs=5, slow_us=20) if seed % 4 else None
    config = as_pinned(rng.fork(), as_kept(rng.fork(), config) if disk else replace(config, windows=(0, 4)))
    clients = retaining(rng.fork(), returning(rng.fork(), with_own_bounds(drawn.clients)))
    clients = tuple(replace(client, arrival_us=client.arrival_us + 150 * place) for place, client in enumerate(clients))
    end_us = max(client.arrival_us for client in clients)
    return replace(
        drawn, config=config, clients=clients, reset_us=tuple(range(0, end_us, end_us // 9 + 1)),
        weights=draw_weights(rng.fork(), end_us)[: 2 * (seed // 4 % 2)], disk=disk, second_us=20,
        shutdown_us=NEVER, faults=replace(drawn.faults, short=rng.choose((20, 40, 67)), shortages=60, deaths=0),
    )  # fmt: skip


def tally(simulation: Simulation) -> Counter[str]:
    """How often each thing has happened that a shortage must not disturb."""
    found, was_short = Counter[str](), False
    for event in simulation.events:
        is_short = isinstance(event, MemoryRanShort)
        found["in a row"] += is_short and was_short
        was_short = is_short or (was_short and not isinstance(event, StepCommitted))
        plan = plan_of(event)
        found["preempted"] += plan is not None and len(plan.preempted) > 0
        found["drafted"] += isinstance(event, StepCommitted) and bool(event.drafted)
        for kind in (StepRewound, StepLimitRaised, EnginePaused, BlocksPromoted):
            found[kind.__name__] += isinstance(event, kind)
        found["all wait"] += type(event) is MemoryRanShort
    return found


def told(seeds: Iterable[int]) -> Counter[str]:
    """The sum over these scenarios, in all of which every law holds and every answer is right."""
    found = Counter[str]()
    for seed in seeds:
        simulation = Simulation(dense(seed))
        try:
            simulation.run_and_require_all()
        except Exception as error:
            error.add_note(f"dense({seed})")
            raise
        found += tally(simulation)
    return found


@pytest.mark.parametrize("seeds", HALVES)
def test_answers_are_right_where_rows_go_back_again_and_again(seeds: range) -> None:
    found = told(seed for seed in seeds if seed % 4)
    fewest = {"StepRewound": 200, "in a row": 100, "drafted": 40, "StepLimitRaised": 100, "EnginePaused": 10, "BlocksPromoted": 5}
    fewest["preempted"] = 5 if seeds == HALVES[0] else 0
    assert all(found[what] >= count for what, count in fewest.items()), found


def test_answers_are_right_where_all_wait_again_and_again() -> None:
    found = told(seed for seeds in HALVES for seed in seeds if not seed % 4)
    fewest = {"all wait": 150, "in a row": 50, "preempted": 20, "drafted": 40, "StepLimitRaised": 80, "EnginePaused": 4}
    assert all(found[what] >= count for what, count in fewest.items()) and not found["StepRewound"], found
