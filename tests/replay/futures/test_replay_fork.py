"""vnext-replay fork: futures are legal, seeded, equal in any number of processes, and show where a failure begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from log_drive import record, small_config

from vnext.replay.cli.main import main
from vnext.replay.futures.fork import Order, fork, spread, states_at, wilson
from vnext.replay.futures.forking import future_of, future_options
from vnext.replay.futures.redecided import folded, recorded_events
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify
from vnext.sched import engine
from vnext.sched.turn import steady_run
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import RequestAborted, StepCommitted
from vnext.state.reduce import fold

PREDICATE = '''
def twelve_gave_way(before, event, after):
    return after.counters.preempted - before.counters.preempted > 0 and after.counters.preempted > 12
'''


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return record(tmp_path / "log", config=small_config(page_count=16), arrivals=60)


def order_of(log_dir: Path, **changes) -> Order:
    fields = dict(
        log=str(log_dir), points=(40,), forks=8, steps=120, seed=5, aborts_per_mille=30, resets_per_mille=10, predicate="",
        share=0, shares=1,
    )  # fmt: skip
    return Order(**(fields | changes))


def test_a_right_engine_has_no_failing_future(log_dir, capsys):
    assert main(["fork", str(log_dir), "60", "--points", "3", "--forks", "9", "--steps", "200", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["forks"], answer["failed"], len(answer["points"])) == (9, 0, 3)
    assert answer["steps"] >= 9 * 150 and [point["step"] for point in answer["points"]] == [-1, 30, 60]


def test_a_future_follows_from_its_seed(log_dir):
    log = open_log(log_dir)
    state, options = states_at(log, [50])[50], future_options(log, 80, 100, 20)
    reported = []
    one = [future_of(state, seed, options, lambda before, event, after: reported.append(event)) for seed in (1, 1, 2)]
    assert one[0] == one[1] and [future.kind for future in one] == ["", "", ""]
    assert len(reported) > 3 * 2 * 80 * 0.9
    half = len(reported) // 3
    assert reported[: half // 2] != reported[-half // 2 :]


def test_steady_turns_tell_the_same_futures(log_dir, monkeypatch):
    """As event by event."""
    state, options = states_at(open_log(log_dir), [50])[50], future_options(open_log(log_dir), 300, 20, 5)
    found, turns = [], []
    monkeypatch.setattr(engine, "steady_run", lambda *given: turns.append(run := steady_run(*given)) or run)
    for _ in range(2):
        found.append([future_of(state, seed, options) for seed in range(1, 50, 7)])
        monkeypatch.setattr(engine, "steady_run", lambda *given: None)
    assert found[0] == found[1] and all(future.kind == "" and future.digest for future in found[0])
    assert sum(len(run.counts) for run in turns if run is not None) > 50


@pytest.mark.parametrize("kind", [RequestAborted, StepCommitted])
def test_the_event_that_breaks_a_future_is_its_last(log_dir, monkeypatch, kind):
    def broken(state, event):
        if isinstance(event, kind) and state.planned > 60:
            raise IllegalEvent("broken")
        return fold(state, event)

    state, options = states_at(open_log(log_dir), [50])[50], future_options(open_log(log_dir), 300, 20, 5)
    monkeypatch.setattr(engine, "fold", broken)
    future = future_of(state, 1, options)
    assert future.message == "IllegalEvent: broken" and isinstance(future.events[-1], kind)
    *_, (_, _, after) = folded(state, future.events[:-1])
    assert after.sequence == state.sequence + len(future.events) - 1


def test_the_commit_whose_ends_break_a_future_is_its_last(log_dir, monkeypatch):
    """A run of turns has folded all but who leaves."""
    def broken(state, gone, ending):
        raise IllegalEvent("broken")

    state, options = states_at(open_log(log_dir), [50])[50], future_options(open_log(log_dir), 300, 0, 0)
    monkeypatch.setattr(engine, "finish", broken)
    future = future_of(state, 1, options)
    assert future.message == "IllegalEvent: broken" and isinstance(future.events[-1], StepCommitted)
    *_, (_, _, after) = folded(state, future.events)
    assert after.counters.finished > state.counters.finished and after.sequence == state.sequence + len(future.events)


def test_processes_share_the_same_futures(log_dir):
    alone, _ = fork(order_of(log_dir))
    shared, _ = fork(order_of(log_dir), jobs=2)
    assert alone == shared and alone.forks == 8


def test_processes_run_no_file_of_the_working_directory(log_dir, tmp_path):
    for name in ("pickle", "queue", "msgspec", "vnext", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')\nraise SystemExit(3)\n")
    program = tmp_path / "bin" / "program.py"  # as pip installs one: the folder that is searched first is its own
    program.parent.mkdir()
    program.write_text("from vnext.replay.cli.main import process\nif __name__ == '__main__':\n    raise SystemExit(process())\n")
    command = [sys.executable, str(program), "fork", str(log_dir), "20", "--jobs", "2", "--forks", "4", "--steps", "5"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(Path(__file__).parents[3])})
    assert not (tmp_path / "ran").exists() and ran.returncode in (0, 1) and "futures" in ran.stdout, ran


def test_a_failure_is_more_likely_where_it_is_near(log_dir, tmp_path, capsys):
    """What a predicate calls a failure needs time: from the start it lies beyond a short future."""
    file = tmp_path / "own.py"
    file.write_text(PREDICATE)
    arguments = [
        "fork",
        str(log_dir),
        "100",
        "--points",
        "2",
        "--forks",
        "30",
        "--steps",
        "40",
        "--predicate",
        f"{file}:twelve_gave_way",
    ]
    assert main([*arguments, "--json", "-o", str(tmp_path / "failing")]) == 1
    answer = json.loads(capsys.readouterr().out)
    early, late = answer["points"]
    assert early["failed"] == 0 < late["failed"] and answer["kinds"] == {"predicate": late["failed"]}
    assert late["low"] < late["probability"] <= late["high"]
    assert verify(open_log(tmp_path / "failing"), all_laws=True).same, "the failing future is a legal log"
    assert main(arguments) == 1
    assert "█" in capsys.readouterr().out


def test_bad_inputs_are_one_sentence(log_dir, capsys):
    assert main(["fork", str(log_dir), "99999"]) == 2
    assert "step 99999 is not in this log" in capsys.readouterr().err
    assert main(["fork", str(log_dir), "3", "--forks", "0"]) == 2
    assert main(["fork", str(log_dir), "3", "--predicate", "nothing.py:no"]) == 2


def test_a_ring_is_forked_from_where_it_begins(tmp_path, capsys):
    """Its first segments are gone: futures begin with its snapshot, and so does the log of one that fails."""
    ring = record(tmp_path / "ring", config=small_config(page_count=16), arrivals=160, size=1500, max_bytes=8000)
    first = first_state(open_log(ring)).planned
    assert open_log(ring).header.index > 0 and first > 5
    last = str(first + 8)
    assert main(["fork", str(ring), last, "--points", "3", "--forks", "9", "--steps", "60", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [point["step"] for point in answer["points"]] == [-1, round(first + 3.5), first + 8] and answer["steps"] > 9 * 30
    assert main(["fork", str(ring), last, "--forks", "2", "--jobs", "2", "--steps", "5"]) == 0
    assert main(["fork", str(ring), str(first - 1), "--forks", "2"]) == 2
    assert f"step {first - 1} is not in this log" in capsys.readouterr().err


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize("at_first", [True, False])
def test_a_failing_future_of_a_ring_is_written_from_its_snapshot_on(tmp_path, capsys, privacy, at_first):
    """It folds again to the very state in which the future failed. The ring has requests left where its segments are packed late, too."""
    ring = record(tmp_path / "ring", privacy, small_config(page_count=16), arrivals=120, size=1500, max_bytes=20_000)
    first, out, file = first_state(open_log(ring)), tmp_path / "failing", tmp_path / "own.py"
    file.write_text("def gave_way(before, event, after):\n    return after.counters.preempted > before.counters.preempted\n")
    step = "-1" if at_first else str(first.planned + 3)
    arguments = ["fork", str(ring), step, "--forks", "60", "--steps", "200", "--predicate", f"{file}:gave_way"]
    assert main([*arguments, "-o", str(tmp_path / "one.vnextlog")]) == 2
    assert "cannot be one file: name a new folder" in capsys.readouterr().err
    assert main([*arguments, "-o", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["written"] == str(out)
    log = open_log(out)
    assert verify(log, all_laws=True).same and digest(first_state(log)) == digest(first)
    *_, (before, _, after) = folded(first, tuple(recorded_events(log)))
    assert after.counters.preempted > before.counters.preempted and after.planned >= int(step)


def test_points_are_spread_and_bounded():
    assert spread(60, 1) == (60,) and spread(60, 3) == (-1, 30, 60) and spread(0, 9) == (-1, 0)
    low, high = wilson(5, 10)
    assert low == pytest.approx(0.2366, abs=1e-3) and high == pytest.approx(0.7634, abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0) and wilson(0, 50)[0] == 0.0
