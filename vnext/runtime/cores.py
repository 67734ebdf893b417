"""Cores: how many threads compute, how long each kind of thread looks for news before it sleeps, and who is bound where.

The only place that decides it, for `vnext doctor` to show. The ranks' teams, the engine core, the API server and the client
share the cores of one machine, and a thread that spins on a core that another needs makes a step many times slower: so the
ranks together have as many threads as there are cores, and who waits for another process spins only where there are more.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

TEAM_SPIN_US = 200
"""An idle thread of the kernels' team: longer than what lies between two operations of a step."""
RING_SPIN_US = 50.0
"""A rank that waits for the engine core, where there are cores to spare."""
RANKS_SPIN_US = 200.0
"""A rank that waits for another one's part of a sum, where each has a core: as long as ranks of a step usually wait."""
OPENMP_SPIN_COUNT = 1000
"""Of torch's own team, where the kernels were not built. One that spins long starves the other processes."""
BINDING = (
    "nobody is bound to a core: work is taken, not given, so a thread that the system did not schedule holds nobody up, "
    "while a bound one waits for whoever has its core"
)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(world_size: int) -> int:
    """Threads of one rank: the cores shared among the ranks.

    The engine core and the API take a core's time now and then; the kernels' team goes on with those that are left (its
    work is taken, not given). Where the kernels were not built torch's own team computes, which waits for its slowest
    member: one core is left to the others then.
    """
    cores = usable_cores()
    return max(1, (cores if kernels_are_built() else cores - 1) // world_size)


def kernels_are_built() -> bool:
    """Whether the CPU's own kernels were compiled, without importing them or torch."""
    return find_spec("vnext.kernels.cpu._native") is not None


def ring_spin_us(reader_count: int) -> float:
    """How long a reader of the ring looks again before it sleeps: not at all unless each reader, the writer's process and the
    one that serves the clients can have a core of their own."""
    return RING_SPIN_US if usable_cores() >= reader_count + 2 else 0.0


def ranks_spin_us(world_size: int) -> float:
    """How long a rank looks for another one's part before it sleeps: not at all unless each has a core."""
    return RANKS_SPIN_US if usable_cores() >= world_size else 0.0


def describe(world_size: int = 1) -> dict[str, str]:
    """What is decided here for an engine of so many ranks, by what it is about, in words."""
    team = f"{default_threads(world_size)} a rank on {usable_cores()} cores"
    alone = "torch keeps to one beside the kernels' team" if kernels_are_built() else "torch's own, one core left to others"
    spins = {"the team": TEAM_SPIN_US, "a rank for its plan": ring_spin_us(world_size), "ranks": ranks_spin_us(2)}
    return {
        "threads": f"{team}; {alone}",
        "spinning": ", ".join(f"{who} {f'{spin:.0f} us' if spin else 'not at all'}" for who, spin in spins.items())
        + "; then asleep",
        "binding": BINDING,
    }
