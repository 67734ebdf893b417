"""The walk: many thousand events of seeded scenarios, every law after every event, every stream against its oracle."""

from __future__ import annotations

import pytest

from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.simulator import Outcome, simulate
from vnext.state import admitting, columns, columns_numpy, reduce as reducer

PARTS = 8
FIRST_SEED = 10_000
SEEN = ("finished", "aborted", "preempted", "prefix_hit_tokens")


@pytest.mark.parametrize("part", range(PARTS))
def test_walk(part: int, walk_event_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that fails is in the message; `simulate(scenario(seed))` runs it again.

    Every other part has arenas of a few places, so that histories and tables move every few steps; half of the parts
    walk with the columns' plain form and half with the compiled one, where it was built.
    """
    if part % 2:
        monkeypatch.setattr(reducer, "ARENA_PLACES_MIN", 8)
        monkeypatch.setattr(admitting, "TOKENS_SPARE", 1)
    if part % 4 > 1:
        monkeypatch.setattr(columns, "kernels", columns_numpy)
    events, seed, met = 0, FIRST_SEED * (part + 1), dict.fromkeys(SEEN, 0)
    while events < walk_event_count // PARTS:
        outcome = run(seed)
        events += len(outcome.events)
        for name in SEEN:
            met[name] += getattr(outcome.state.counters, name)
        seed += 1
    if events >= 5_000:
        assert all(met.values()), f"the scenarios met too little: {met}"


def run(seed: int) -> Outcome:
    try:
        return simulate(scenario(seed))
    except Exception as error:  # any failure of any kind: its seed is what matters
        raise AssertionError(f"scenario({seed}) failed: {type(error).__name__}: {error}") from error
