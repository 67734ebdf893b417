"""Ctrl-C in each command of vnext-bench: one line, status 130, and the report of what had ended.

Commands that load a server are in test_bench_serve.py.
"""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from vnext.commands.bench.cli import main
from vnext.commands.bench.options import MEASURES, OWN

ENGINE = ["--executor", "inproc", "--threads", "1", "--input-len", "8", "--output-len", "24"]
MODEL = ["8b", "--num-prompts", "8", "--input-len", "16", "--output-len", "4"]


class Case(NamedTuple):
    """Ctrl-C comes in the call `nth` of a module's function; `ended` is what is said then, and `runs` the report's, by their key;
    `found` is what the function gives, where running it would take long."""

    argv: list[str]
    module: str
    function: str
    nth: int
    ended: str
    runs: tuple[str, list[object]] | None = None
    found: object = None


CASES = {
    "latency": Case(["--log", "off", *ENGINE, "--repeats", "3"], "engine_runs", "timed", 3, "2 of 3 batches"),
    "startup": Case(["--log", "off", *ENGINE[:4], "--repeats", "3"], "engine_runs", "warm_up", 2, "1 of 3 starts"),
    "cache": Case([*ENGINE, "--hit-rates", "0,50", "--num-prompts", "2"], "cache", "batch_ran", 4, "3 of 4 batches", ("gain", [True, False])),
    "overlap": Case([*ENGINE, "--batches", "1,2"], "overlap", "timed", 4, "1 of 2 batches", ("batch", [1])),
    "allreduce": Case(
        ["--ranks", "2,3", "--sizes", "2", "--rounds", "1", "--device", "cpu"], "all_reduce", "timed", 2, "1 of 2 numbers of ranks",
        ("ranks", [2]), [{"kib": 2, "library": 3e-6, "one_shot": 1e-6, "two_shot": 2e-6}],
    ),
    "comm": Case(["--batches", "2,4,8", "--rounds", "2"], "control.comm", "measured", 4, "1 of 3 batches", ("batch", [2, 2])),
    "sched": Case(["--batches", "2,4,8", "--rounds", "2"], "control.sched", "core_us", 3, "2 of 3 batches", ("batch", [2, 4])),
    "simulate": Case([*MODEL], "control.simulate", "run_of", 3, "2 loads", ("load", [1, 2])),
    "size": Case(
        [*MODEL, "--slo", "ttft.p99<5s", "--request-rate", "2"], "control.size", "fewest", 3, "2 of 4 numbers of GPUs",
        ("gpus_each", [1, 2]),
    ),
}  # fmt: skip
LOADS = {"serve", "throughput", "sweep"}


def press(monkeypatch: pytest.MonkeyPatch, case: Case, nth: int) -> None:
    module, calls = import_module(f"vnext.commands.bench.{case.module}"), []

    def called(*given: object, **named: object) -> object:
        calls.append(given)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return case.found or own(*given, **named)

    own = getattr(module, case.function)
    monkeypatch.setattr(module, case.function, called)


def test_each_command_has_a_case() -> None:
    assert {*CASES} | LOADS == {*MEASURES, *OWN}


@pytest.mark.parametrize("command", CASES)
def test_what_had_ended_is_reported(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, path = CASES[command], tmp_path / "report.json"
    press(monkeypatch, case, case.nth)
    assert main([command, *case.argv, "--json", str(path)]) == 130
    said, report = capsys.readouterr(), json.loads(path.read_text())
    assert said.err == f"vnext-bench: interrupted: {case.ended} had ended, and the figures are of these\n"
    assert said.out and report["figures"]
    if case.runs is not None:
        key, wanted = case.runs
        assert [key in run if isinstance(wanted[0], bool) else run[key] for run in report["runs"]] == wanted
    else:
        assert report["figures"]["repeats" if command == "latency" else "starts"] == case.nth - 1


@pytest.mark.parametrize("command", ["latency", "comm", "size"])
def test_where_nothing_had_ended_it_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    press(monkeypatch, CASES[command], 1)
    assert main([command, *CASES[command].argv, "--json", str(tmp_path / "report.json")]) == 130
    said = capsys.readouterr()
    assert said.err == "vnext-bench: interrupted, nothing was measured\n" and not said.out and not [*tmp_path.iterdir()]
