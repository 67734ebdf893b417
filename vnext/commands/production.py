"""`vnext doctor --production`: what this machine lacks for serving others, one line a finding with its remedy.

Owns the checks and their bounds. A problem ends in an exit status of 1: something will fail. Advice costs speed or evenness.
Reads the system's files below a root, tries the port, and writes and deletes one file where the logs go; changes nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from vnext.base import compiled
from vnext.base.exits import DONE, FAILED
from vnext.options.reader import DoctorCommand
from vnext.runtime.processes.cpu_limits import cpu_quota
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.console import write_line
from vnext.server.http.connections import FILES_BESIDE
from vnext.server.settings import ServerSettings
from vnext.server.tls import AddressUnusable, bind

GIB = 2**30
FILES_MIN = ServerSettings().connections_max + FILES_BESIDE
PROCESSES_MIN, PIDS_MIN, BACKLOG_MIN = 4_096, 512, 1_024
SHM_FREE_MIN, MEMORY_FREE_MIN = 256 * 2**20, 2 * GIB
LOG_FREE_MIN = EngineSettings().log_max_bytes
INODES_MIN = 1_000
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen", "ptp_kvm")
SWAPPINESS_MAX = 10
WRITTEN_BYTES, WRITE_BYTES, SYNCS = 8 * 2**20, 2**16, 5
LOG_BYTES_PER_S_MIN = 20 * 10**6
SYNC_S_MAX = 0.02


class Finding(NamedTuple):
    """`level` "ok": nothing to do."""

    level: Literal["ok", "advice", "problem"]
    name: str
    sentence: str


class Host(NamedTuple):
    """Where to look and what the server would use."""

    root: Path
    log_dir: Path
    address: str
    port: int

    def text(self, path: str) -> str:
        """A system's file, "" where there is none."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def number(self, path: str) -> int | None:
        """A system's file that is a number; None for none, and for "max"."""
        text = self.text(path)
        return int(text) if text.lstrip("-").isdigit() else None

    def fields(self, path: str) -> dict[str, int]:
        """Bytes by name, of a file such as /proc/meminfo; counts for entries without a unit."""
        words = (line.replace(":", "").split() for line in self.text(path).splitlines())
        return {word[0]: int(word[1]) * (1024 if word[-1] == "kB" else 1) for word in words if len(word) > 1 and word[1].isdigit()}


def production(command: DoctorCommand) -> int:
    """Print the findings; returns the exit status."""
    parent = Path(os.path.expanduser(command.log_dir or "~/.local/state/vnext/logs"))  # as it is, for a user without a home
    found = examine(Host(Path("/"), parent, command.host, command.port))
    if command.json:
        print(json.dumps([each._asdict() for each in found], indent=2))
    else:
        for each in found:
            write_line(f"{each.level:8} {each.name}: {each.sentence}")
    return FAILED if any(each.level == "problem" for each in found) else DONE


def examine(host: Host) -> list[Finding]:
    """All findings, those to act on first."""
    found = [each for check in CHECKS for each in check(host)]
    return sorted(found, key=lambda each: ("problem", "advice", "ok").index(each.level))


def modules(_: Host) -> Iterator[Finding]:
    compiled.check()
    if compiled.absent:
        yield Finding("problem", "compiled modules", compiled.lacking())
    else:
        yield Finding("ok", "compiled modules", f"all {len(compiled.MODULES)}")


def limits(_: Host) -> Iterator[Finding]:
    """The limits of this process, which the server inherits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < FILES_MIN:
        need = f"the server needs {FILES_MIN:,} for its connections"
        yield Finding("problem", "open files", f"at most {files:,}, and {need}: LimitNOFILE=65536 in the unit, or ulimit -Hn")
    else:
        yield Finding("ok", "open files", "unlimited" if files == resource.RLIM_INFINITY else f"up to {files:,}")
    sizes = (resource.RLIMIT_FSIZE, "file size", "ulimit -f"), (resource.RLIMIT_AS, "address space", "ulimit -v")
    for name, what, remedy in sizes:
        if (most := resource.getrlimit(name)[0]) != resource.RLIM_INFINITY:
            yield Finding("problem", what, f"limited to {most:,} bytes, where logs or weights end: {remedy} unlimited")
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if processes != resource.RLIM_INFINITY and processes < PROCESSES_MIN:
        yield Finding("advice", "threads", f"at most {processes:,} of this user: ulimit -u {PROCESSES_MIN} (TasksMax= in a unit)")


def memory(host: Host) -> Iterator[Finding]:
    fields = host.fields("proc/meminfo")
    free = fields.get("MemAvailable", 0)
    if free < MEMORY_FREE_MIN:
        yield Finding("problem", "memory", f"only {free / GIB:.1f} GiB are free: stop other programs, or set --kv-cache-memory")
    else:
        yield Finding("ok", "memory", f"{free / GIB:.1f} GiB free")
    swappiness = host.number("proc/sys/vm/swappiness")
    if fields.get("SwapTotal") and (swappiness is None or swappiness > SWAPPINESS_MAX):
        size = f"{fields['SwapTotal'] / GIB:.1f} GiB, and idle weights may move there (vm.swappiness {swappiness})"
        yield Finding("advice", "swap", f"{size}: swapoff -a, or sysctl vm.swappiness=1")
    if reserved := fields.get("HugePages_Total", 0) * fields.get("Hugepagesize", 0):
        unused = f"{reserved / GIB:.1f} GiB are reserved, and vnext uses transparent ones"
        yield Finding("advice", "hugepages", f"{unused}: sysctl vm.nr_hugepages=0, unless others need them")
    if host.text("proc/sys/vm/overcommit_memory") == "2":
        yield Finding("advice", "overcommit", "vm.overcommit_memory is 2, and weights are mapped: sysctl vm.overcommit_memory=0")


def huge(host: Host) -> Iterator[Finding]:
    """Transparent huge pages, which weights and cache ask for."""
    text = host.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never" or not text:
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("advice", "huge pages", f"transparent ones are off, so reading weights misses the TLB more often: {remedy}")
    else:
        yield Finding("ok", "huge pages", f"transparent, {chosen}")


def processors(host: Host) -> Iterator[Finding]:
    """NUMA nodes, frequency, clock."""
    nodes = [path for path in (host.root / "sys/devices/system/node").glob("node[0-9]*") if path.is_dir()]
    if len(nodes) > 1:
        remedy = "give each a rank (--tensor-parallel-size), or keep an engine on one (--numa 0)"
        yield Finding("advice", "NUMA", f"{len(nodes)} nodes, and memory of another one is slower: {remedy}")
        if host.text("proc/sys/kernel/numa_balancing") == "1":
            yield Finding("advice", "NUMA balancing", "on, which unmaps pages to watch them: sysctl kernel.numa_balancing=0")
    found = (host.root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {path.read_text().strip() for path in found}
    if slow := sorted(governors - {"performance"}):
        yield Finding("advice", "frequency", f"the governor is {', '.join(slow)}: cpupower frequency-set -g performance")
    clock = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if clock and clock not in GOOD_CLOCKS:
        cost = "each reading is a system call"
        yield Finding("advice", "clock", f"{clock}, of which {cost}: choose tsc (boot with tsc=reliable if it is stable)")
    else:
        yield Finding("ok", "clock", clock or "unknown")


def control_group(host: Host) -> Iterator[Finding]:
    """Limits of the container or the unit, of either version of cgroups."""
    cores, group = len(os.sched_getaffinity(0)), _group(host)
    if 0 < (share := cpu_quota(host.root)) < cores:
        stall = f"{share:.1f} cores' time on {cores} cores, and everything stalls when it is used up"
        yield Finding("advice", "CPU quota", f"{stall}: give whole cores in its place (--cpuset-cpus, AllowedCPUs=)")
    most = host.number(f"{group}/memory.max") or host.number("sys/fs/cgroup/memory/memory.limit_in_bytes")
    used = host.number(f"{group}/memory.current") or host.number("sys/fs/cgroup/memory/memory.usage_in_bytes") or 0
    if most is not None and most < 2**60 and most - used < MEMORY_FREE_MIN:
        left = f"{(most - used) / GIB:.1f} GiB are left of the group's {most / GIB:.1f}"
        yield Finding("problem", "memory limit", f"{left}: raise --memory or MemoryMax=")
    pids = host.number(f"{group}/pids.max")
    if pids is not None and pids < PIDS_MIN:
        few = f"the group may have {pids} processes and threads"
        yield Finding("problem", "tasks", f"{few}: raise it to {PIDS_MIN} (--pids-limit, TasksMax=)")


def _group(host: Host) -> str:
    """The folder of this process's group in version 2; the root's where there is none."""
    lines = (line.split(":", 2) for line in host.text("proc/self/cgroup").splitlines())
    path = next((parts[2] for parts in lines if len(parts) == 3 and parts[0] == "0"), "/")
    own = f"sys/fs/cgroup{path}".rstrip("/")
    return own if (host.root / own / "cpu.max").is_file() else "sys/fs/cgroup"


def shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm, through which the ranks communicate."""
    free = _free(host.root / "dev/shm")
    if free is None or free < SHM_FREE_MIN:
        size = "missing" if free is None else f"{free / 2**20:.0f} MiB free"
        remedy = "mount it with 1 GiB (in a container: --shm-size=1g)"
        yield Finding("problem", "/dev/shm", f"{size}, and ranks communicate through it: {remedy}")
    else:
        yield Finding("ok", "/dev/shm", f"{free / 2**20:,.0f} MiB free")


def log_disk(host: Host) -> Iterator[Finding]:
    """Room and speed where the logs go."""
    try:
        folder = next(each for each in (host.log_dir, *host.log_dir.absolute().parents) if each.exists())
        free, inodes = _free(folder), os.statvfs(folder)
        rate, sync_s = disk_speed(folder)
    except OSError as error:
        yield Finding("problem", "log disk", f"{host.log_dir} cannot be written ({error.strerror}): choose another --log-dir")
        return
    if free is not None and free < LOG_FREE_MIN:
        room = f"{host.log_dir} has {free / GIB:.1f} GiB free, and a log may take {LOG_FREE_MIN / GIB:.0f}"
        yield Finding("problem", "log disk", f"{room}: make room, or set --log-max-bytes and --log-keep")
    elif inodes.f_files and inodes.f_favail < INODES_MIN:
        yield Finding("problem", "log disk", f"{host.log_dir} has {inodes.f_favail} inodes left: delete files")
    elif rate < LOG_BYTES_PER_S_MIN or sync_s > SYNC_S_MAX:
        slow = f"{host.log_dir} takes {rate / 1e6:.0f} MB/s and {1e3 * sync_s:.0f} ms to sync"
        yield Finding("advice", "log disk", f"{slow}: choose a local disk, and leave --log-durable off")
    else:
        speed = f"{rate / 1e6:,.0f} MB/s, {1e3 * sync_s:.1f} ms to sync"
        yield Finding("ok", "log disk", f"{host.log_dir}: {(free or 0) / GIB:.1f} GiB free, {speed}")


def disk_speed(folder: Path) -> tuple[float, float]:
    """Bytes a second of a file that is written and synced, and the seconds of a sync after a small write (median)."""
    data, syncs = os.urandom(WRITE_BYTES), []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".vnext-doctor-") as file:
        began_s = time.monotonic()
        for _ in range(WRITTEN_BYTES // WRITE_BYTES):
            os.write(file.fileno(), data)
        os.fdatasync(file.fileno())
        rate = WRITTEN_BYTES / max(time.monotonic() - began_s, 1e-9)
        for _ in range(SYNCS):
            os.write(file.fileno(), data[:512])
            began_s = time.monotonic()
            os.fdatasync(file.fileno())
            syncs.append(time.monotonic() - began_s)
    return rate, sorted(syncs)[SYNCS // 2]


def network(host: Host) -> Iterator[Finding]:
    """The port, and connections that may wait for it."""
    try:
        bind(host.address, host.port).close()
        yield Finding("ok", "port", f"{host.address}:{host.port} is free")
    except AddressUnusable as error:
        yield Finding("problem", "port", str(error).rstrip("."))
    backlog = host.number("proc/sys/net/core/somaxconn")
    if backlog is not None and backlog < BACKLOG_MIN:
        yield Finding("advice", "backlog", f"{backlog} connections may wait: sysctl net.core.somaxconn={BACKLOG_MIN}")


def _free(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    modules, limits, memory, huge, processors, control_group, shared_memory, log_disk, network,
)  # fmt: skip
