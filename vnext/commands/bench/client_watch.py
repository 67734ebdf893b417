"""Client watch: checks that a measurement can be trusted: the load of other programs, and delays in its own client.

The client is one event loop. A busy loop reads and sends late, and the server then seems slow. So a task that is due every
few milliseconds records how late it wakes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

TICK_S = 0.01
LAG_MS_MAX = 20.0
"""The 99th percentile above which a report contains a note."""
CPU_SHARE_MAX = 0.9
BUSY_CORES_MAX = 0.5
SAMPLE_S = 0.2


class LoopWatch:
    """Watches the running event loop until `stop` returns the figures."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._begin_s, self._begin_cpu_s = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self._late_s.append(time.perf_counter() - begin_s - TICK_S)

    def stop(self) -> dict[str, float]:
        """Stop; returns how late the loop woke, and the share of one core that the client used."""
        self._task.cancel()
        share = (time.process_time() - self._begin_cpu_s) / max(1e-9, time.perf_counter() - self._begin_s)
        late_ms = 1e3 * float(np.percentile(self._late_s, 99)) if self._late_s else 0.0
        return {"client_late_p99_ms": round(late_ms, 3), "client_cores": round(share, 3)}


def client_notes(figures: dict[str, float]) -> list[str]:
    """A note where the client itself was the bottleneck."""
    late_ms, share = figures.get("client_late_p99_ms", 0.0), figures.get("client_cores", 0.0)
    if late_ms <= LAG_MS_MAX and share <= CPU_SHARE_MAX:
        return []
    return [
        f"the client did not keep up (it woke {late_ms:.0f} ms late, 99th percentile, and took {share:.2f} of a core): the times "
        "above hold its delays too, so ask for less, or measure from another machine"
    ]


def cores_busy() -> float:
    """The number of cores that other programs use, measured during a short sleep of this one; 0 where it cannot be read."""
    before = _ticks()
    time.sleep(SAMPLE_S)
    busy, idle = (after - earlier for after, earlier in zip(_ticks(), before))
    return round(busy / (busy + idle) * _core_count(), 2) if busy + idle else 0.0


def busy_notes(busy: float) -> list[str]:
    """A note where other programs were busy."""
    if busy <= BUSY_CORES_MAX:
        return []
    return [f"other programs kept {busy:.1f} of {_core_count()} cores busy before the measurement: its times say little"]


def _ticks() -> tuple[int, int]:
    """Busy and idle time of all cores, as /proc/stat counts it."""
    path = Path("/proc/stat")
    fields = [int(word) for word in path.read_text().split("\n", 1)[0].split()[1:9]] if path.is_file() else [0] * 8
    idle = fields[3] + fields[4]
    return sum(fields) - idle, idle


def _core_count() -> int:
    path = Path("/proc/stat")
    return sum(line[3:4].isdigit() for line in path.read_text().splitlines() if line.startswith("cpu")) if path.is_file() else 0
