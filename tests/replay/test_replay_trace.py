"""vnext-replay trace: a valid trace-event file whose slices nest, whose numbers are the log's."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from log_drive import engine, record, small_config, started

from vnext.replay.cli import main
from vnext.replay.folding import Folded, fold
from vnext.replay.info import info
from vnext.replay.source import open_log
from vnext.runtime.recorder import Recorder
from vnext.runtime.segments import Bounds
from vnext.sched.explain import explain
from vnext.state.digest import digest
from vnext.state.events import StepCommitted, StepPlanned

NEEDED = {"X": {"ts", "dur"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}
ROUNDING_US = 0.002


def traced(log_dir: Path, out: Path, *options: str) -> list[dict]:
    assert main(["trace", str(log_dir), "-o", str(out), *options]) == 0
    content = json.loads(out.read_text())
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def recorded_with_stamps(log_dir: Path, arrivals: int = 60) -> Path:
    config = small_config(running_max=2)
    recorder = Recorder.open(log_dir, started(config), "full", Bounds(segment_bytes=4000, stamped=True))
    for events, befores, after, ranks in engine(config, 3, arrivals):
        recorder.append(events, befores, digest(after), ranks)
    recorder.close()
    return log_dir


def require_nested(events: list[dict]) -> None:
    """Of two slices of one lane either one lies in the other or they do not meet."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_ends: list[float] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begin + ROUNDING_US:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + ROUNDING_US
            open_ends.append(end)


@pytest.mark.parametrize("stamped", [True, False])
def test_a_trace_is_valid_and_nests(tmp_path, stamped):
    log_dir = recorded_with_stamps(tmp_path / "log") if stamped else record(tmp_path / "log", arrivals=60)
    events = traced(log_dir, tmp_path / "trace.json")
    for event in events:
        assert {"ph", "pid", "tid", "name"} | NEEDED[event["ph"]] <= set(event), event
        assert all(isinstance(event[name], (int, float)) for name in ("ts", "dur") if name in event)
        assert event["ph"] != "i" or event["s"] in "tpg"
    require_nested(events)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    assert {event["ph"] for event in events} == set(NEEDED)
    assert not stamped or "not taken: sequences" in {event["name"] for event in events}


def test_what_it_shows_is_what_the_log_holds(tmp_path):
    config = small_config(block_count=16)
    log_dir = record(tmp_path / "log", config=config, arrivals=80)
    counts, events = info(open_log(log_dir)), traced(log_dir, tmp_path / "trace.json")
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["pid"] == 1]
    whole = [event for event in slices if event["name"].startswith("request ")]
    assert sorted(event["name"] for event in steps) == sorted(f"step {number}" for number in range(counts.steps))
    assert sorted(int(event["name"].split()[1]) for event in whole) == list(range(counts.requests))
    assert sum(event["args"]["samples"] for event in steps) == counts.sampled_tokens
    gave_way = [event for event in events if event["name"].startswith("gives way")]
    assert len(gave_way) == counts.preemptions > 0
    for event in events:
        if event["name"] == "cache blocks":
            assert sum(event["args"].values()) == config.block_count and min(event["args"].values()) >= 0
    reasons = Counter(event["name"].split(": ")[1] for event in events if event["name"].startswith("not taken"))
    assert reasons == changes_of_reasons(log_dir) and set(reasons) >= {"blocks", "order", "room", "budget"}


def changes_of_reasons(log_dir) -> Counter:
    """How often a request waits for another reason than before, asked of the scheduler in every step."""
    notes: dict[int, str] = {}
    found: Counter = Counter()
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded) and isinstance(item.event, StepPlanned):
            whys = {wait.id: wait.why for wait in explain(item.before).waits}
            for entry in item.after.waiting:
                why = whys[entry.id]
                found[why] += why not in ("preempted", notes.get(entry.id))
                notes[entry.id] = why
    return found


def test_brief_leaves_out_chunks_only(tmp_path):
    log_dir = record(tmp_path / "log")
    whole, brief = traced(log_dir, tmp_path / "1.json"), traced(log_dir, tmp_path / "2.json", "--brief")
    assert [event for event in whole if " from " not in event["name"]] == brief and len(brief) < len(whole)


def test_chunks_are_those_of_the_steps(tmp_path):
    """Each computed token is drawn once, unless its request was aborted while the step ran."""
    log_dir = record(tmp_path / "log", config=small_config(pipeline_depth=1, block_count=400))
    chunks = [event["name"] for event in traced(log_dir, tmp_path / "trace.json") if " from " in event["name"]]
    computed = 0
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded) and isinstance(item.event, StepCommitted):
            flight = item.before.flights[0]
            computed += sum(count for id_, count in zip(flight.ids, flight.counts) if id_ in item.before.requests)
    assert sum(int(name.split()[0]) for name in chunks) == computed > 400


def test_stamps_are_times(tmp_path):
    events = traced(recorded_with_stamps(tmp_path / "log"), tmp_path / "trace.json")
    times = [event["ts"] for event in events if event["ph"] == "C"]
    assert times == sorted(times) and len(set(times)) > len(times) // 4


def test_bad_inputs_are_one_sentence(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    assert main(["trace", str(log_dir), "-o", str(tmp_path / "missing" / "trace.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing"), "-o", str(tmp_path / "trace.json")]) == 2
