"""The walk: many events of seeded scenarios, in parts that may be walked anywhere and in any order.

Owns what a part is, how it is walked, and the sentence about all parts that ends a test run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from tests.sim.seeds import SeedFailed, explained, run_seed

PARTS = 128
FIRST_SEED = 10_000
"""Of part 0; each part begins so many seeds behind the one before."""
WALKED = "walked"
"""The property under which a test reports its part."""
SEEN = ("finished", "aborted", "preempted", "prefix_hit_tokens")


class Walked(msgspec.Struct, frozen=True):
    """What one part did: events checked, seeds in [first_seed, next_seed), totals of what it met, how it failed ("")."""

    part: int
    events: int
    first_seed: int
    next_seed: int
    seconds: float
    met: dict[str, int]
    failure: str


def walk_part(part: int, events_min: int) -> Walked:
    """Seeds in order until so many events are checked, or one of them fails."""
    started_s, events, failure = time.monotonic(), 0, ""
    first_seed = seed = FIRST_SEED * (part + 1)
    met = dict.fromkeys(SEEN, 0)
    while events < events_min and not failure:
        try:
            simulation = run_seed(seed)
            for name in SEEN:
                met[name] += getattr(simulation.state.counters, name)
            events += simulation.event_count
        except SeedFailed as failed:
            small = explained(failed)
            failure = "\n".join([str(failed), f"the smallest failing events are {len(small.events)}:", *small.lines, small.message])
        seed += 1
    return Walked(part, events, first_seed, seed, round(time.monotonic() - started_s, 2), met, failure)


def summary(walked: Iterable[Walked]) -> str:
    """One sentence about all that was walked."""
    walked = sorted(walked, key=lambda one: one.part)
    events, seeds = sum(one.events for one in walked), sum(one.next_seed - one.first_seed for one in walked)
    seconds, failed = sum(one.seconds for one in walked), sum(bool(one.failure) for one in walked)
    parts = ", ".join(f"{one.first_seed}-{one.next_seed - 1}" for one in walked)
    end = f"{failed} failed" if failed else "all laws hold"
    return f"walk: {events} events of {seeds} scenarios checked in {seconds:.0f} s of one core, {end} (seeds {parts})"
