"""Tests of perf.count_instructions: its output with and without valgrind and records, and a run of both programs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from perf import count_instructions
from perf.steady_core import SteadyCore
from perf.steady_edge import SteadyEdge
from vnext.commands.machine import machine


def test_a_change_is_told_against_the_newest_record_of_this_processor(tmp_path: Path) -> None:
    for day, model, sets, step in (("20", "one", ["avx2"], 50), ("21", "one", ["avx2"], 100), ("22", "other", [], 7), ("23", "one", [], 9)):
        record = {"machine": {"cpu_model": model, "instruction_sets": sets}, "instructions": {"step": step}}
        (tmp_path / f"2026-11-{day}-instructions-{model}.json").write_text(json.dumps(record))
    known = count_instructions.newest_record("one", ("avx2",), tmp_path)
    assert known["instructions"] == {"step": 100}
    lines = count_instructions.compared({"step": 90, "token": 5}, known["instructions"], "one")
    assert lines == ["step 90 (-10.0 % against the record of this processor)", "token 5 (not in the record of this processor)"]
    assert count_instructions.newest_record("third", (), tmp_path) is None
    assert count_instructions.compared({"step": 90}, None, "third")[-1] == "no record of third to compare with"


def test_the_median_of_the_runs_is_taken_and_each_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [100, 112, 101, 99, 102]  # one run of five had its messages come at another time
    monkeypatch.setattr(count_instructions, "count", lambda program: {"step": steps.pop(), "visit": 7})
    monkeypatch.setattr(count_instructions, "reason_not_to_count", lambda: None)
    monkeypatch.setattr("sys.argv", ["count_instructions", "--program", "core", "--runs", "5", "--json", str(tmp_path / "counted.json")])
    assert count_instructions.main() == 0 and "instructions: step 101" in capsys.readouterr().out
    record = json.loads((tmp_path / "counted.json").read_text())
    assert record["instructions"] == {"step": 101, "visit": 7}
    assert sorted(record["runs"]["step"]) == [99, 100, 101, 102, 112] and record["runs"]["visit"] == [7] * 5


@pytest.mark.parametrize(
    ("step", "python", "status"), [(103, "", 0), (104, "", 1), (90, "", 0), (150, "3.9.1", 0)], ids=["noise", "more", "less", "another Python"]
)
def test_more_instructions_than_the_record_allows_do_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: int, python: str, status: int
) -> None:
    own = msgspec.to_builtins(machine())
    record = {"machine": own | ({"python": python} if python else {}), "instructions": {"step": 100, "visit": 7}}
    monkeypatch.setattr(count_instructions, "newest_record", lambda *_: record)
    monkeypatch.setattr(count_instructions, "count", lambda program: {"step": step, "visit": 7})
    monkeypatch.setattr(count_instructions, "reason_not_to_count", lambda: None)
    monkeypatch.setattr("sys.argv", ["count_instructions", "--program", "core", "--gate", "3"])
    assert count_instructions.main() == status
    sentence = "instructions: a step takes 4.0 % more instructions than the record: find what costs them"
    assert capsys.readouterr().out.count(sentence) == status
    monkeypatch.setattr("sys.argv", ["count_instructions", "--program", "core"])
    assert count_instructions.main() == 0, "without a gate the lines alone"


def test_without_valgrind_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["count_instructions"])
    assert count_instructions.main() == 0
    assert capsys.readouterr().out == "instructions: not counted, because there is no valgrind here: apt install valgrind\n"


def test_what_is_due_by_the_clock_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {clock: getattr(time, clock) for clock in ("monotonic", "monotonic_ns")}
    for clock, reads in kept.items():
        monkeypatch.setattr(time, clock, reads)  # to be restored
    count_instructions.stop_clock()
    stopped = time.monotonic(), time.monotonic_ns()
    began_ns = kept["monotonic_ns"]()
    while kept["monotonic_ns"]() == began_ns:
        pass
    assert (time.monotonic(), time.monotonic_ns()) == stopped


def test_the_steady_core_is_steady() -> None:
    with SteadyCore() as core:
        core.ask(4, 50)
        while len(core.core.state.rows) < 4:  # they come through a socket, each when it likes
            core.run(1)
        rows = core.core.state.rows.id.tolist()
        core.run(8)
        assert core.core.state.rows.id.tolist() == rows == [0, 1, 2, 3]
        core.ask(1, 2)
        core.run(4)
        assert core.core.state.counters.finished == 1
        steps = count_instructions.STEPS // count_instructions.WINDOWS
        assert steps % core.core.state.config.block_size == 0, "some windows have more steps than others in which blocks fill"


def test_the_steady_edge_streams() -> None:
    with SteadyEdge(3) as edge:
        edge.run(5)  # each reader is asserted to get an event in each step
