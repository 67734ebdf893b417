"""Tests of the comparison with vLLM's control plane: its rows, its arithmetic, a run against a stand-in, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.peers import control_measuring, control_plane

ROOT = Path(__file__).resolve().parents[1]
OTHER = {"other-1": {"step_32": 1e6, "arrival": 5.0}, "other-1-synchronous": {"step_32": 2e6}}
# An interpreter as `--vllm` names one: asked to import it prints a size in KiB, given a script a runner's line.
STAND_IN = """#!{python}
import json, sys
print("a library's greeting")
print(1000 if sys.argv[1] == "-c" else json.dumps({{"about": {{"version": "1"}}, "figures": {figures}}}))
"""


def session(round_index: int, **figures: dict[str, float]) -> dict[str, object]:
    return {"round": round_index, "figures": figures}


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perf.peers.control_plane", "--json", str(tmp_path / "record.json"), *arguments]
    environment = {**os.environ, "PEERS": str(tmp_path / "peers")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip


def test_figures_are_medians_over_rounds_and_ratios_are_costs_of_others() -> None:
    ours, theirs = [10.0, 30.0, 20.0], [40.0, 80.0, 60.0]
    sessions = [session(place, vnext={"arrival": value}) for place, value in enumerate(ours)]
    sessions += [session(place, other={"arrival": value, "loop": 1.0}) for place, value in enumerate(theirs)]
    rows = control_plane.rows_of(sessions)
    assert rows == {"arrival": {"vnext": ours, "other": theirs}, "loop": {"other": [1.0, 1.0, 1.0]}}
    assert control_plane.times_less(rows["arrival"]) == {"other": 3.0}
    assert control_plane.times_less(rows["loop"]) == {}
    recorded = control_plane.record(control_plane.machine(), sessions)["rows"]
    assert recorded["arrival"]["engines"]["other"] == {"median": 60.0, "min": 40.0, "max": 80.0, "runs": theirs}


def test_a_further_piece_goes_on_with_the_rounds() -> None:
    assert control_plane.next_round([]) == 0
    assert control_plane.next_round([session(0), session(1), session(0)]) == 2


def test_an_engine_that_leaves_its_steady_state_gives_no_figure() -> None:
    class Leaving:
        step = message = encode = staticmethod(bytes)

        def running(self) -> int:
            return 31

    with pytest.raises(RuntimeError, match="31 of 32 requests"):
        control_measuring.measured_steps(Leaving(), 32)


def test_a_prompt_that_was_cached_otherwise_than_meant_gives_no_figure() -> None:
    class Cold:
        next = arrive = staticmethod(lambda: None)

        def first(self) -> int:
            return 4096

    with pytest.raises(RuntimeError, match="first_hit: 4096 tokens were computed instead of 16"):
        control_measuring.measured_prompts(lambda shared: Cold(), tokens_hit=16, tokens_miss=4096)


def test_a_run_measures_every_row_of_vnext_beside_another(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(STAND_IN.format(python=sys.executable, figures=repr(OTHER)))
    other.chmod(0o755)
    ran = run(tmp_path, "--rounds", "1", "--vllm", str(other))
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert list(rows) == list(control_plane.ROWS)
    for name, row in rows.items():
        assert row["engines"]["vnext"]["median"] > 0, name
        assert control_plane.ROWS[name][0] in ran.stdout, name
    assert rows["step_32"]["vnext_takes_less_by"].keys() == {"other-1", "other-1-synchronous"}
    assert rows["import_mb"]["engines"]["other-1"]["runs"] == [1.024]
    assert all(rows[f"message_{count}"]["engines"]["vnext"]["max"] < 64 for count in control_plane.RUNNING)


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "--rounds", "1", "--vllm", "/bin/false")
    assert ran.returncode == 1 and "run_vllm_scheduler.py with /bin/false failed" in ran.stderr, ran.stderr
    assert not (tmp_path / "record.json").exists()
