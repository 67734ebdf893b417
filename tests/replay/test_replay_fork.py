"""vnext-replay fork: futures are legal, seeded, equal in any number of processes, and show where a failure begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_drive import record, small_config
from msgspec.structs import replace

from vnext.replay import forking
from vnext.replay.cli import main
from vnext.replay.fork import Order, fork, spread, states_at, wilson
from vnext.replay.forking import future_of, wishes_of
from vnext.replay.source import open_log
from vnext.replay.verify import verify
from vnext.sched.stride import stride

PREDICATE = '''
def twelve_gave_way(before, event, after):
    return after.counters.preempted - before.counters.preempted > 0 and after.counters.preempted > 12
'''


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return record(tmp_path / "log", config=small_config(block_count=16), arrivals=60)


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
    state, wishes = states_at(log, [50])[50], wishes_of(log, 80, 100, 20)
    told = []
    one = [future_of(state, seed, wishes, lambda before, event, after: told.append(event)) for seed in (1, 1, 2)]
    assert one[0] == one[1] and [future.kind for future in one] == ["", "", ""]
    assert len(told) > 3 * 2 * 80 * 0.9
    half = len(told) // 3
    assert told[: half // 2] != told[-half // 2 :]


def test_strides_tell_the_same_futures(log_dir, monkeypatch):
    """Every seventh future as it is told event by event; one whose strides go wrong is named a failure."""
    log = open_log(log_dir)
    state, wishes = states_at(log, [50])[50], wishes_of(log, 300, 20, 5)
    for seed in range(1, 50, 7):
        plain = forking._told(forking._Course(state, seed, wishes, None))
        assert future_of(state, seed, wishes) == plain and plain.kind == "" and plain.digest

    def wrong(state, turns_max, samples):
        found = stride(state, turns_max, samples)
        counters = replace(found.state.counters, generated_tokens=found.state.counters.generated_tokens + 1)
        return replace(found, state=replace(found.state, counters=counters))

    monkeypatch.setattr(forking, "stride", wrong)
    found = future_of(state, 0, wishes)
    assert found.kind == forking.TWINS and "in strides" in found.message


def test_processes_share_the_same_futures(log_dir):
    alone, _ = fork(order_of(log_dir))
    shared, _ = fork(order_of(log_dir), jobs=2)
    assert alone == shared and alone.forks == 8


def test_a_failure_is_more_likely_where_it_is_near(log_dir, tmp_path, capsys):
    """What a predicate calls a failure needs time: from the start it lies beyond a short future."""
    file = tmp_path / "own.py"
    file.write_text(PREDICATE)
    arguments = ["fork", str(log_dir), "100", "--points", "2", "--forks", "30", "--steps", "40", "--predicate", f"{file}:twelve_gave_way"]
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


def test_points_are_spread_and_bounded():
    assert spread(60, 1) == (60,) and spread(60, 3) == (-1, 30, 60) and spread(0, 9) == (-1, 0)
    low, high = wilson(5, 10)
    assert low == pytest.approx(0.2366, abs=1e-3) and high == pytest.approx(0.7634, abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0) and wilson(0, 50)[0] == 0.0
