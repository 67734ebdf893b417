"""Thread plan: how many threads compute, and how long each kind of thread spins before it sleeps. Where they run is placement.py's.

All these decisions are made here, and `vnext doctor` shows them. The ranks' thread pools, the engine core, the API server and
the client share the cores of one machine, and a thread that spins on a core that another needs makes a step many times slower.
So the ranks together have as many threads as there are cores, and a waiting process spins only where cores are to spare.
"""

from __future__ import annotations

from importlib.util import find_spec

from vnext.runtime.processes.placement import chosen, places, threads_at_most
from vnext.runtime.processes.topology import here

TEAM_SPIN_US = 200
"""An idle thread of the kernels' pool: longer than the gap between two operations of a step."""
RING_SPIN_US = 50.0
"""A rank that waits for the engine core, where cores are to spare."""
RANKS_SPIN_US = 200.0
"""A rank that waits for another rank's part of a sum, where each has a core: as long as ranks usually wait for each other."""
OPENMP_SPIN_COUNT = 1000
"""Spin count of torch's own pool, where the kernels were not built. A thread that spins long starves the other processes."""
UNBOUND = (
    "no thread is bound to a core: threads take work when they run, so one that the system does not schedule delays no "
    "other, while a bound one would have to wait for its core"
)


def usable_cores() -> int:
    """Cores that this process may use: physical ones of the fastest kind, as many as its control group allows at once."""
    return here().cores


def default_threads(world_size: int, numa: str = "auto") -> int:
    """Threads of one rank: the cores shared among the ranks.

    The engine core and the API server need a core's time now and then; the kernels' pool goes on with the remaining cores,
    because its threads take work instead of being assigned it. Where the kernels were not built, torch's own pool computes,
    which waits for its slowest member: then one core is left to the other processes.
    """
    part = chosen(here(), numa)
    return threads_at_most(part, world_size) if kernels_are_built() else max(1, (part.cores - 1) // world_size)


def why_not(threads: int | None, world_size: int, numa: str) -> str:
    """Why an engine cannot have so many threads a rank (None: decided here) or these nodes on this machine; "" where it can."""
    try:
        chosen(here(), numa)
    except ValueError as error:
        return str(error)
    if (threads or 1) > here().allowed:
        fitting = default_threads(world_size, numa)
        return (
            f"threads is {threads}, and this process may use {here()}: more threads than processors compute the same tokens later; "
            f"take --threads {fitting}, or leave it out"
        )
    return ""


def kernels_are_built() -> bool:
    """Whether the CPU's own kernels were compiled; imports neither them nor torch."""
    return find_spec("vnext.kernels.cpu._native") is not None


def ring_spin_us(reader_count: int) -> float:
    """How long a reader of the ring spins before it sleeps: 0 unless each reader, the writer's process and the API server can
    each have a core."""
    return RING_SPIN_US if usable_cores() >= reader_count + 2 else 0.0


def ranks_spin_us(world_size: int) -> float:
    """How long a rank spins for another rank's part before it sleeps: 0 unless each rank has a core."""
    return RANKS_SPIN_US if usable_cores() >= world_size else 0.0


def describe(world_size: int = 1) -> dict[str, str]:
    """The decisions for an engine of `world_size` ranks, by topic, in words."""
    threads = default_threads(world_size)
    where = places(here(), world_size, threads, "auto")
    bound = "; ".join(f"rank {rank} is {place}" for rank, place in enumerate(where)) if where[0].cpus else UNBOUND
    alone = (
        "torch uses one thread beside the kernels' own"
        if kernels_are_built()
        else "torch's threads, which leave one core free"
    )
    spins = {"kernel threads": TEAM_SPIN_US, "a rank awaiting a plan": ring_spin_us(world_size), "ranks": ranks_spin_us(2)}
    return {
        "cores": str(here()),
        "threads": f"{threads} per rank; {alone}",
        "spinning": ", ".join(f"{who} {f'{spin:.0f} us' if spin else 'not at all'}" for who, spin in spins.items())
        + ", then sleep",
        "binding": bound,
    }
