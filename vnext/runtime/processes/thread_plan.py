"""Thread plan: how many threads compute, and how long each kind of thread spins before it sleeps, and where they run.

All these decisions are made here, and `vnext doctor` shows them. The ranks' thread pools, the engine core, the API server and
the client share the cores of one machine, and a thread that spins on a core that another needs makes a step many times slower.
So the ranks together have as many threads as there are cores, and a waiting process spins only where cores are to spare.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vnext.runtime.processes.cpu_limits import ROOT, allowed_cpus, cpu_quota, list_of, numbers_of, read

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


# ---- the machine's cores -----------------------------------------------------------------------------------------
# Those that this process should compute on: cores and not their hyperthreads, fast cores and not slow ones, by NUMA node. /sys is
# read under any root, so that recorded trees can be tested. A machine that says nothing has one node and as many cores as logical
# processors.

CAPACITY_SHARE, FREQUENCY_SHARE = 0.5, 0.75
"""Of the largest: a core with less is slow. Cores of one kind differ by a few hundredths in the frequency of their turbo; the
little cores of big.LITTLE have a third of the capacity, compact cores two thirds of the frequency."""


class Topology(NamedTuple):
    """`cpus`: one logical processor of each core to compute on, node by node. `nodes`: the NUMA node of each. `allowed`: how many
    logical processors the affinity mask has; `slow`: cores left out because others are faster; `quota`: processors' time by the
    control groups, 0.0 for all."""

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    allowed: int
    slow: int
    quota: float

    @property
    def cores(self) -> int:
        """How many threads may compute at once."""
        return max(1, min(len(self.cpus), int(self.quota))) if self.quota else len(self.cpus)

    @property
    def node_ids(self) -> tuple[int, ...]:
        """The nodes, each once, in order."""
        return tuple(dict.fromkeys(self.nodes))

    def on(self, node: int) -> tuple[int, ...]:
        """The processors of a node."""
        return tuple(cpu for cpu, its in zip(self.cpus, self.nodes) if its == node)

    def within(self, nodes: tuple[int, ...]) -> Topology:
        """Those of some nodes alone."""
        kept = [place for place, node in enumerate(self.nodes) if node in nodes]
        return self._replace(cpus=tuple(self.cpus[place] for place in kept), nodes=tuple(self.nodes[place] for place in kept))

    def __str__(self) -> str:
        """In words: how many cores, and why not all logical processors."""
        count = len(self.node_ids)
        found = f"{_counted(self.cores, 'core')} on {_counted(count, 'NUMA node')}" if count > 1 else _counted(self.cores, "core")
        siblings = self.allowed - len(self.cpus) - self.slow
        why = [f"{_counted(self.slow, 'processor')} of slower cores"] if self.slow else []
        why += [_counted(siblings, "hyperthread")] if siblings else []
        left_out = [f"not on {' and '.join(why)}"] if why else []
        if self.quota and self.cores < len(self.cpus):
            left_out.append(f"the control group allows the time of {self.quota:g} of {_counted(len(self.cpus), 'core')}")
        return f"{found} ({'; '.join(left_out)})" if left_out else found


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


@cache
def here() -> Topology:
    """This machine's, as it was for this process when it first asked: before it bound itself to some of it."""
    return topology()


def topology(root: Path = ROOT) -> Topology:
    """The machine whose /sys and /proc lie under `root`."""
    allowed, devices = allowed_cpus(root), root / "sys/devices/system"
    fast = fast_cpus(root, allowed)
    firsts = sorted({siblings(devices, cpu, fast)[0] for cpu in fast})
    node_of = nodes_of(devices)
    ordered = sorted(firsts, key=lambda cpu: (node_of.get(cpu, 0), cpu))
    nodes = tuple(node_of.get(cpu, 0) for cpu in ordered)
    return Topology(tuple(ordered), nodes, len(allowed), len(allowed) - len(fast), cpu_quota(root))


def siblings(devices: Path, cpu: int, among: tuple[int, ...]) -> tuple[int, ...]:
    """The logical processors of one core, of some."""
    folder = devices / f"cpu/cpu{cpu}/topology"
    names = read(folder / "core_cpus_list") or read(folder / "thread_siblings_list")
    return tuple(each for each in numbers_of(names) if each in among) or (cpu,)


def nodes_of(devices: Path) -> dict[int, int]:
    folders = sorted((devices / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in numbers_of(read(folder / "cpulist"))}


def fast_cpus(root: Path, allowed: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the allowed processors that are as fast as any: Intel names its P-cores, Arm gives capacities, all others
    frequencies."""
    named = numbers_of(read(root / "sys/devices/cpu_core/cpus"))
    if found := tuple(cpu for cpu in allowed if cpu in named):
        return found
    for name, share in (("cpu_capacity", CAPACITY_SHARE), ("cpufreq/cpuinfo_max_freq", FREQUENCY_SHARE)):
        speeds = {cpu: int(read(root / f"sys/devices/system/cpu/cpu{cpu}/{name}") or 0) for cpu in allowed}
        if all(speeds.values()):
            return tuple(cpu for cpu in allowed if speeds[cpu] >= share * max(speeds.values()))
    return allowed


def nodes_text(nodes: tuple[int, ...]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {list_of(nodes)}"
