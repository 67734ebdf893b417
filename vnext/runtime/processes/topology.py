"""The processors that this process should compute on: cores and not their hyperthreads, fast cores and not slow ones, by NUMA node.

Owns the reading of /sys, under any root, so that recorded trees can be tested. A machine that says nothing has one node and as many
cores as logical processors.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from vnext.runtime.processes.cpu_limits import ROOT, allowed_cpus, cpu_quota, list_of, numbers_of, read

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
    """The node of each logical processor."""
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
    """Nodes, for people."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {list_of(nodes)}"
