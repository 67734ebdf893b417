"""Placement: which cores each rank of an engine on the CPU computes on, and which memory its cache lies in.

Pure: every rank works it out by itself from the same facts, and binds itself (rank/loading.py). A rank is bound to its cores as a
whole, because its threads take work when they run. Where its cores lie on several NUMA nodes, each thread is bound to those of one
node, so that the weights that it packs, and thereby puts into memory first, are those that it reads.
"""

from __future__ import annotations

from typing import NamedTuple

from vnext.runtime.processes.cpu_limits import list_of, numbers_of
from vnext.runtime.processes.topology import Topology, nodes_text


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
