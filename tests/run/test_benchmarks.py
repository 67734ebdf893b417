"""Each benchmark of perf/ that is short runs to its end: those that are run by hand break unseen when what they measure moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = (
    "bench_cpu_kernels", "bench_engine", "bench_log", "bench_replay", "bench_replay_tools", "bench_replay_whole", "bench_ring",
    "bench_state", "bench_step_overhead", "bench_launches",
)  # fmt: skip
"""The last one leaves a driver in its process that finds no GPU and says nothing of it."""
PARTS = 3
NOT_RUN = {
    "bench_api_overhead": "a program", "bench_router": "a program", "bench_draft_draws": "models of transformers",
    "bench_exec": "minutes of an engine", "bench_step_times": "minutes of two engines", "bench_replay_ui": "a browser",
    "bench_server_cost": "a server under load", "bench_startup": "weights in the shape of a real model",
}  # fmt: skip


def outcome(files: list[Path], folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """Of these in one process, which imports torch once."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "tests.run.once", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    places = ["--rootdir", str(root), "--basetemp", str(folder / "base"), *map(str, files)]
    return subprocess.run([*command, *places], cwd=root, capture_output=True, text=True, timeout=280)


def test_every_benchmark_is_run_or_has_a_reason(root: Path) -> None:
    assert {path.stem for path in (root / "perf").glob("bench_*.py")} == {*RUN, *NOT_RUN}


@pytest.mark.parametrize("part", range(PARTS))
def test_each_runs_once(root: Path, tmp_path: Path, part: int) -> None:
    ran = outcome([root / "perf" / f"{name}.py" for name in RUN[part::PARTS]], tmp_path, root)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-1000:]


def test_one_that_has_rotted_is_found(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bench_gone.py").write_text("def test_it(benchmark):\n    benchmark.pedantic(len, ([],), rounds=9)\n    benchmark(lambda: gone)\n")
    ran = outcome([tmp_path / "bench_gone.py"], tmp_path, root)
    assert ran.returncode == 1 and "name 'gone' is not defined" in ran.stdout
