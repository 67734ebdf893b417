"""`vnext doctor --production`: each finding on a machine that has it, and none on one that has not."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vnext.base import compiled
from vnext.commands import production
from vnext.commands.cli import main
from vnext.commands.production import FILES_MIN, GIB, Finding, Host, disk_speed, examine
from vnext.options.reader import DoctorCommand, parse

GOOD = {
    "proc/meminfo": "MemAvailable: 67108864 kB\nSwapTotal: 0 kB\nHugePages_Total: 0\nHugepagesize: 2048 kB",
    "proc/sys/vm/swappiness": "60",
    "proc/sys/vm/overcommit_memory": "0",
    "proc/sys/net/core/somaxconn": "4096",
    "proc/sys/kernel/numa_balancing": "1",
    "proc/self/cgroup": "0::/system.slice/vnext.service",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    "sys/fs/cgroup/system.slice/vnext.service/cpu.max": "max 100000",
    "sys/fs/cgroup/system.slice/vnext.service/memory.max": "max",
    "sys/fs/cgroup/system.slice/vnext.service/pids.max": "max",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/node/node0/meminfo": "",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
}
GROUP = "sys/fs/cgroup/system.slice/vnext.service"
HERE = len(os.sched_getaffinity(0))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """A machine with these files beside, or in place of, those of a good one."""
    monkeypatch.setattr(production, "_free", lambda folder: 64 * GIB)
    monkeypatch.setattr(production, "disk_speed", lambda folder: (500e6, 0.001))
    monkeypatch.setattr(resource, "getrlimit", lambda name: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def made(**files: str) -> Host:
        for name, text in (GOOD | files).items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return Host(tmp_path / "root", tmp_path / "logs", "127.0.0.1", 0)

    return made


def bad(host: Host) -> list[Finding]:
    return [each for each in examine(host) if each.level != "ok"]


def test_a_good_machine_has_no_finding(host: Callable[..., Host]) -> None:
    assert bad(host()) == [] and len(examine(host())) >= 6


def test_missing_modules_are_a_problem(host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "absent", {"vnext.log._log": compiled.NOT_BUILT})
    [found] = bad(host())
    assert found.level == "problem" and found.sentence.startswith("vnext runs without 1 of its 8 compiled modules (log._log)")


@pytest.mark.parametrize(
    ("files", "level", "sentence"),
    [
        ({"proc/meminfo": "MemAvailable: 1048576 kB"}, "problem", "memory: only 1.0 GiB are free: stop other programs"),
        ({"proc/meminfo": GOOD["proc/meminfo"].replace("SwapTotal: 0", "SwapTotal: 1048576")}, "advice", "swap: 1.0 GiB"),
        ({"proc/meminfo": GOOD["proc/meminfo"].replace("Total: 0\n", "Total: 512\n")}, "advice", "hugepages: 1.0 GiB are reserved"),
        ({"proc/sys/vm/overcommit_memory": "2"}, "advice", "overcommit: vm.overcommit_memory is 2"),
        ({"proc/sys/net/core/somaxconn": "128"}, "advice", "backlog: 128 connections may wait: sysctl net.core.somaxconn=1024"),
        ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "advice", "huge pages: transparent ones are off"),
        ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, "advice", "frequency: the governor is powersave"),
        ({"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, "advice", "clock: hpet"),
        ({f"{GROUP}/cpu.max": "50000 100000"}, "advice", f"CPU quota: 0.5 cores' time on {HERE} cores"),
        ({f"{GROUP}/memory.max": str(3 * GIB), f"{GROUP}/memory.current": str(2 * GIB)}, "problem", "memory limit: 1.0 GiB are left"),
        ({f"{GROUP}/pids.max": "100"}, "problem", "tasks: the group may have 100 processes"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_remedy(host: Callable[..., Host], files: dict, level: str, sentence: str) -> None:
    [found] = bad(host(**files))
    assert found.level == level and f"{found.name}: {found.sentence}".startswith(sentence)
    assert ": " in found.sentence and "\n" not in found.sentence


def test_several_nodes_of_memory_and_their_balancing(host: Callable[..., Host]) -> None:
    assert [each.name for each in bad(host(**{"sys/devices/system/node/node1/meminfo": ""}))] == ["NUMA", "NUMA balancing"]


def test_the_first_version_of_control_groups(host: Callable[..., Host], tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": str(GIB)}
    of_process = {
        "proc/self/mountinfo": "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
        "proc/self/cgroup": "4:cpu:/\n1:memory:/",
    }
    made = host(**{f"sys/fs/cgroup/{name}": text for name, text in files.items()}, **of_process)
    for name in ("cpu.max", "memory.max", "pids.max"):
        (made.root / GROUP / name).unlink()
    assert [each.name for each in bad(made)] == ["memory limit", "CPU quota"]


def test_a_machine_that_tells_nothing_is_no_fault_of_the_program(tmp_path: Path) -> None:
    names = {each.name for each in bad(Host(tmp_path, tmp_path, "127.0.0.1", 0)) if each.level == "problem"}
    assert names <= {"memory", "/dev/shm", "open files", "log disk"} and "memory" in names


def test_limits_of_the_process(host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    few = {resource.RLIMIT_NOFILE: FILES_MIN - 1, resource.RLIMIT_FSIZE: 10**6, resource.RLIMIT_NPROC: 100}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (few.get(name, resource.RLIM_INFINITY),) * 2)
    assert [(each.level, each.name) for each in bad(host())] == [
        ("problem", "open files"), ("problem", "file size"), ("advice", "threads"),
    ]  # fmt: skip


def test_a_full_or_slow_disk_and_a_folder_that_cannot_be_written(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(production, "disk_speed", lambda folder: (5e6, 0.001))
    assert [each.sentence.split(" takes ")[1].split(":")[0] for each in bad(host())] == ["5 MB/s and 1 ms to sync"]
    monkeypatch.setattr(production, "_free", lambda folder: GIB if folder.name != "shm" else 64 * GIB)
    assert [(each.level, each.name) for each in bad(host())] == [("problem", "log disk")]
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    found = [each for each in production.log_disk(Host(tmp_path, tmp_path / "file" / "logs", "127.0.0.1", 0))]
    assert [each.level for each in found] == ["problem"] and "cannot be written" in found[0].sentence


def test_the_disk_is_left_as_it_was(tmp_path: Path) -> None:
    rate, sync_s = disk_speed(tmp_path)
    assert rate > 0 and sync_s >= 0 and list(tmp_path.iterdir()) == []


def test_the_command_ends_with_1_for_a_problem_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(production, "CHECKS", (production.network,))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--production", "--port", port, "--log-dir", str(tmp_path)]) == 1
    assert f"problem  port: port {port} of 127.0.0.1 is in use: end its program" in capsys.readouterr().out
    monkeypatch.setattr(production, "CHECKS", (lambda host: [Finding("advice", "a", "b: c")],))
    assert main(["doctor", "--production", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"level": "advice", "name": "a", "sentence": "b: c"}]


def test_options_of_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["doctor", "--production", "--port", "81"], {"VNEXT_LOG_DIR": "/logs"})
    assert command == DoctorCommand(json=False, production=True, log_dir="/logs", port=81)
    for wrong in (["doctor", "--port", "81"], ["doctor", "--production", "--port", "99999"]):
        with pytest.raises(SystemExit) as error:
            parse(wrong, {})
        assert error.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
