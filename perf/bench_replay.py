"""Benchmark of vnext-replay on a log of a million steps: any step, a request, a difference, percentiles; and verify.

    python scripts/make_log.py build/replay-1000000 --steps 1000000 --batch 8      once, about a minute
    python -m pytest perf/bench_replay.py

The long log is written once, because that takes longer than all measurements; the first test builds its index. A command
is measured from the opening of the log, in a process that has imported the tool. `test_show_process` measures the whole
command, including the start of the interpreter.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.make_log import make_log
from vnext.log import codec
from vnext.replay.answers.diff import diff
from vnext.replay.answers.request_life import life
from vnext.replay.answers.stat import stat
from vnext.replay.cli.files import redact
from vnext.replay.reading.cachefile import CACHE_SUFFIX
from vnext.replay.reading.index import Index
from vnext.replay.reading.info import info
from vnext.replay.reading.show import show
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify

ROOT = Path(__file__).resolve().parents[1]
LONG_STEPS = 1_000_000
LONG = ROOT / "build" / f"replay-{LONG_STEPS}"
STEPS = {8: 20_000, 64: 4_000, 256: 1_200}
MIB = 2**20


@pytest.fixture(scope="module")
def long_log() -> Path:
    if not any(LONG.glob("*.vnextlog")):
        make_log(LONG, LONG_STEPS, 8)
    return LONG


@pytest.fixture(scope="module")
def short_logs(tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("logs")
    for batch, steps in STEPS.items():
        make_log(folder / str(batch), steps, batch, "shape")
    return {batch: folder / str(batch) for batch in STEPS}


def open_blocks(benchmark, rounds: int, target: Callable, arguments: Callable[[], tuple]) -> None:
    """Time many different calls, and note the slowest beside the median."""
    benchmark.pedantic(target, setup=lambda: (arguments(), {}), rounds=rounds)
    times = sorted(benchmark.stats.stats.data)
    benchmark.extra_info["p95_ms"] = round(times[int(0.95 * len(times))] * 1e3, 1)
    benchmark.extra_info["most_ms"] = round(times[-1] * 1e3, 1)


def test_loop(benchmark) -> None:
    """1,000 turns of an empty Python loop: how fast this machine is."""

    def loop() -> None:
        for _ in range(1000):
            pass

    benchmark(loop)


def test_first_open(benchmark, short_logs) -> None:
    """Build the index of a new log."""

    def forgotten() -> tuple:
        for path in short_logs[8].glob(f"*{CACHE_SUFFIX}"):
            path.unlink()
        return ((open_log(short_logs[8]),), {})

    entry = benchmark.pedantic(lambda log: Index(log).last, setup=forgotten, rounds=3)
    benchmark.extra_info["us_per_step_median"] = round(benchmark.stats["median"] * 1e6 / entry.planned, 1)


def test_show_any_step(benchmark, long_log) -> None:
    """Show the whole state at any of a million steps, opening the log each time."""
    index = Index(open_log(long_log))
    assert all(segment.directory.entries for segment in index.segments)
    rng, steps = random.Random(1), index.last.planned
    assert steps >= LONG_STEPS
    open_blocks(benchmark, 100, lambda step: show(Index(open_log(long_log)), step), lambda: (rng.randrange(steps),))
    cache = sum(path.stat().st_size for path in long_log.glob(f"*{CACHE_SUFFIX}"))
    benchmark.extra_info["cache_mib"] = round(cache / MIB, 1)
    benchmark.extra_info["log_mib"] = round(open_log(long_log).size_bytes / MIB, 1)


def test_show_process(benchmark, long_log, tmp_path) -> None:
    """Run the command as a user does, with its modules compiled as in an installation."""
    command = [sys.executable, "-m", "vnext.replay", "show", str(long_log), str(LONG_STEPS * 7 // 9)]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    run = lambda: subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)  # noqa: E731
    benchmark.pedantic(run, rounds=11, warmup_rounds=2)


def test_req(benchmark, long_log) -> None:
    """Show any request's life, with the reason for every step it waited."""
    count, rng = Index(open_log(long_log)).last.next_id, random.Random(2)
    open_blocks(benchmark, 100, lambda id_: life(Index(open_log(long_log)), id_), lambda: (rng.randrange(count),))


def test_info(benchmark, long_log) -> None:
    found = benchmark.pedantic(lambda: info(open_log(long_log)), rounds=5)
    assert found.steps >= LONG_STEPS
    benchmark.extra_info["mib_per_s_median"] = round(found.size_bytes / MIB / benchmark.stats["median"])


def test_stat(benchmark, long_log) -> None:
    """Percentiles after the first open."""
    assert Index(open_log(long_log)).last.planned >= LONG_STEPS
    found = benchmark.pedantic(lambda: stat(Index(open_log(long_log))), rounds=5)
    benchmark.extra_info["mib_per_s_median"] = round(found.size_bytes / MIB / benchmark.stats["median"])
    benchmark.extra_info["steps"] = found.steps


@pytest.mark.parametrize("place", ["nowhere", "first", "middle", "last"])
def test_diff(benchmark, long_log, tmp_path, place: str) -> None:
    """Compare two logs of a million steps that differ in one frame's digest, or nowhere."""
    other = tmp_path / "other"
    shutil.copytree(long_log, other, ignore=shutil.ignore_patterns(f"*{CACHE_SUFFIX}"))
    paths = sorted(other.glob("*.vnextlog"))
    if place != "nowhere":
        _change(paths[-1] if place == "last" else paths[0], {"first": 0.0, "middle": 0.9, "last": 0.99}[place])
    found = benchmark.pedantic(lambda: diff(open_log(long_log), open_log(other)), rounds=3)
    assert found.same == (place == "nowhere")
    benchmark.extra_info["step"] = found.step


def _change(path: Path, share: float) -> None:
    """Change one byte of a frame's body, with a valid checksum, and keep the rest."""
    data = path.read_bytes()
    at = len(codec.MAGIC)
    while (end := at + 8 + int.from_bytes(data[at : at + 4], "little")) <= share * len(data) or at == len(codec.MAGIC):
        at = end
    payload = bytearray(data[at + 8 : end])
    payload[:8] = bytes(8)
    path.write_bytes(data[:at] + codec.seal(bytes(payload)) + data[end:])


@pytest.mark.parametrize("batch", STEPS)
def test_verify(benchmark, short_logs, batch: int) -> None:
    """Fold, re-decide and compare, with arrivals, ends and preemptions."""
    verdict = benchmark.pedantic(verify, args=(open_log(short_logs[batch]),), rounds=3)
    assert verdict.same and verdict.steps == STEPS[batch]
    benchmark.extra_info["steps_per_s_median"] = round(verdict.steps / benchmark.stats["median"])


def test_redact(benchmark, tmp_path) -> None:
    """Fold, redact, write, and fold again as a check."""
    make_log(tmp_path / "full", 5_000, 8)
    number = iter(range(100))
    found = benchmark.pedantic(
        lambda: redact(open_log(tmp_path / "full"), tmp_path / f"shape-{next(number)}"), rounds=3
    )
    assert found.same
    benchmark.extra_info["steps_per_s_median"] = round(5_000 / benchmark.stats["median"])
