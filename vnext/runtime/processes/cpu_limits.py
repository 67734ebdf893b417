"""How much of the processors a process may use: Linux's affinity mask and the CPU limits of its control groups.

Owns the parsing of /proc and of cgroup version 1 and 2, under any root, so that recorded trees can be tested. What is missing or
says nothing limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def read(path: Path) -> str:
    """A file's text without its end, "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers of a list of Linux: "0-2,8" -> (0, 1, 2, 8). Raises ValueError for anything else."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def list_of(numbers: tuple[int, ...]) -> str:
    """The other way about: (0, 1, 2, 8) -> "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def allowed_cpus(root: Path = ROOT) -> tuple[int, ...]:
    """The logical processors that this process may run on, by its affinity mask, which a control group's cpuset narrows."""
    for line in read(root / "proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return numbers_of(line.partition(":")[2].strip())
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float:
    """Processors' time that the control groups allow, in seconds a second: the least of this process's group and all above it;
    0.0 without a limit."""
    return min(filter(None, (quota_in(folder) for folder in control_groups(root))), default=0.0)


def quota_in(folder: Path) -> float:
    """The limit of one control group: `cpu.max` of version 2, or `cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1."""
    fields = read(folder / "cpu.max").split() or [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such file
        return 0.0
    return quota / period if quota > 0 and period > 0 else 0.0


def control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that may limit its processors, and of those above them."""
    paths = dict(own_groups(root))
    for mounted, controllers, mount_root in mounts(root):
        for controller in controllers & paths.keys():
            inner = paths[controller].removeprefix(mount_root.rstrip("/"))
            folder = root / mounted.lstrip("/") / inner.lstrip("/")
            top = root / mounted.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """Controller and path of each of this process's groups: "" for version 2, "cpu" for version 1."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "", path
        elif "cpu" in controllers.split(","):
            yield "cpu", path


def mounts(root: Path) -> Iterator[tuple[str, set[str], str]]:
    """Where control groups are mounted, with which controllers, and which group is at the top of the mount."""
    for line in read(root / "proc/self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        kind, _, options = behind.split(" ", 2)
        _, _, _, mount_root, mounted, *_ = before.split()
        if kind == "cgroup2":
            yield mounted, {""}, mount_root
        elif kind == "cgroup":
            yield mounted, {"cpu"} & set(options.split(",")), mount_root
