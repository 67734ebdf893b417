"""Tests of forks: a rank that is a fork of its engine core is to the system what one is that was spawned."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vnext.runtime.processes.rank_processes import environment_of, start_core
from vnext.runtime.processes.subprocesses import start_child
from vnext.runtime.protocol.settings import EngineSettings

RANK = "vnext.runtime.rank.main"
ENDS_S = 60.0


def files(pid: int) -> dict[int, str]:
    """What each descriptor of a process is: pipes by their numbers."""
    found = {}
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found[int(each.name)] = os.readlink(each)
    return found


def seen(pid: int) -> dict[str, Any]:
    """What others see of a rank."""
    proc = Path(f"/proc/{pid}")
    signals = [line for line in (proc / "status").read_text().splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    environment = dict(sorted(line.split("=", 1) for line in (proc / "environ").read_text().split("\0") if "=" in line))
    kinds = {number: name.partition(":")[0] for number, name in files(pid).items()}
    line = (proc / "cmdline").read_text().rstrip("\0").split("\0")
    return {"line": line, "environment": environment, "files": kinds, "signals": signals}


def test_a_forked_rank_is_what_a_spawned_one_is() -> None:
    """Once both have made their imports and wait for their settings."""
    engine = EngineSettings(threads=3, tensor_parallel_size=2)
    core = start_core("engine core", engine)
    plain = start_child("rank 0", RANK, environment=environment_of(engine))
    end_s = time.monotonic() + ENDS_S
    try:
        while len(ranks := psutil.Process(core.pid).children()) < 2:
            time.sleep(0.02)
        pids = [rank.pid for rank in ranks]
        while not (len(found := seen(plain.pid)["files"]) == 3 and all(seen(pid) == seen(plain.pid) for pid in pids)):
            assert time.monotonic() < end_s, [found, *(seen(pid) for pid in (*pids, plain.pid))]
            time.sleep(0.02)
        assert len({files(pid)[number] for pid in pids for number in (0, 2)}) == 4, "pipes that belong to two ranks"
    finally:
        codes = [child.terminate(ENDS_S) for child in (core, plain)]
    assert codes == [0, -signal.SIGTERM]
    assert psutil.wait_procs(ranks, timeout=ENDS_S)[1] == []
