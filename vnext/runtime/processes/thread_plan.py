"""Thread plan: how many threads compute, and how long each kind of thread spins before it sleeps, and where they run.

All these decisions are made here, and `vnext doctor` shows them. The ranks' thread pools, the engine core, the API server and
the client share the cores of one machine, and a thread that spins on a core that another needs makes a step many times slower.
So the ranks together have as many threads as there are cores, and a waiting process spins only where cores are to spare.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from vnext.runtime.processes.cpu_limits import list_of, numbers_of
from vnext.runtime.processes.topology import Topology, here, nodes_text

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


# ---- placement ---------------------------------------------------------------------------------------------------
# Which cores each rank of an engine on the CPU computes on, and which memory its cache lies in. Pure: every rank works it out by
# itself from the same facts, and binds itself (rank/loading.py). A rank is bound to its cores as a whole, because its threads
# take work when they run. Where its cores lie on several NUMA nodes, each thread is bound to those of one node, so that the
# weights that it packs, and thereby puts into memory first, are those that it reads.


class Place(NamedTuple):
    """`cpus`: the processors that a rank is bound to, () for none. `members`: those of each of its threads, () where all have the
    rank's. `nodes`: over which the pages of its cache are spread, () where they lie where they are first written."""

    cpus: tuple[int, ...] = ()
    members: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.cpus:
            return "bound to no core"
        spread = f", threads and cache over {nodes_text(self.nodes)}" if self.nodes else ""
        return f"bound to processor{'s' if len(self.cpus) > 1 else ''} {list_of(self.cpus)}{spread}"


NOWHERE = Place()
"""Bound to nothing."""


def chosen(found: Topology, numa: str) -> Topology:
    """The part of the machine that --numa names: "auto" and "off" are all of it. Raises ValueError with one sentence."""
    if numa in ("auto", "off"):
        return found
    try:
        nodes = numbers_of(numa)
    except ValueError:
        nodes = ()
    if not nodes:
        raise ValueError(f"numa is {numa!r}: it must be auto, off or a list of nodes such as 0 or 0,2-3")
    if missing := tuple(node for node in nodes if node not in found.node_ids):
        here = f"has cores on {nodes_text(found.node_ids)}"
        raise ValueError(f"numa names {nodes_text(missing)}, and this machine {here}: name some of those, or leave it out")
    return found.within(nodes)


def shares(found: Topology, world_size: int) -> list[tuple[int, ...]]:
    """The cores of each rank, as places in `found`: whole nodes where there are as many as ranks, else as many cores as others,
    node by node. Ranks without cores of their own have ()."""
    nodes, count = found.node_ids, len(found.cpus)
    if len(nodes) >= world_size:
        own = [nodes[rank * len(nodes) // world_size : (rank + 1) * len(nodes) // world_size] for rank in range(world_size)]
        return [tuple(place for place, node in enumerate(found.nodes) if node in its) for its in own]
    size = count // world_size
    return [tuple(range(rank * size, (rank + 1) * size)) for rank in range(world_size)]


def threads_at_most(found: Topology, world_size: int) -> int:
    """Threads of each rank that have a core each, at least 1."""
    if found.cores < len(found.cpus):  # which cores a limit of time leaves is for the system to say
        return max(1, found.cores // world_size)
    return max(1, min(map(len, shares(found, world_size))))


def places(found: Topology, world_size: int, threads: int, numa: str) -> tuple[Place, ...]:
    """Where each rank computes. By itself it binds only an engine of ranks, on several nodes or beside slow cores, and only if
    that has all cores, since another engine could bind itself to the same ones, and each rank has two, since a single one may be
    busy."""
    part = chosen(found, numa)
    own = shares(part, world_size)
    has_all = threads == threads_at_most(part, world_size) and part.cores == len(part.cpus) and min(map(len, own)) > 1
    matters = world_size > 1 or len(part.node_ids) > 1 or part.slow > 0
    is_asked = numa not in ("auto", "off") and all(own)
    if not is_asked and not (numa == "auto" and has_all and matters):
        return (NOWHERE,) * world_size
    return tuple(_place(part, share, threads) for share in own)


def _place(found: Topology, share: tuple[int, ...], threads: int) -> Place:
    cpus, nodes = tuple(found.cpus[place] for place in share), tuple(dict.fromkeys(found.nodes[place] for place in share))
    if len(nodes) == 1:
        return Place(cpus)
    of_thread = (found.nodes[share[member * len(share) // threads % len(share)]] for member in range(threads))
    members = tuple(tuple(cpu for cpu in found.on(node) if cpu in cpus) for node in of_thread)
    return Place(cpus, members, nodes)
