"""vnext-replay trace: a valid trace-event file whose slices nest, whose numbers are the log's."""

from __future__ import annotations

import io
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from core_drive import arrival_of, config_of, started_with
from log_drive import drawn_config, engine, record, small_config, started

from scripts.make_log import make_log
from vnext.log.codec import Frame
from vnext.log.reading import read
from vnext.log.timestamps import BLOCK_MAGIC
from vnext.replay.answers.timeline import Lived, Timeline
from vnext.replay.answers.trace import Traced, trace
from vnext.replay.cli.main import main
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import timestamps_path
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.sched.explain import explain
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import StepInFlight

NEEDED = {"X": {"ts", "dur"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}
ROUNDING_US = 0.002


def traced(log_dir: Path, out: Path, *options: str) -> list[dict]:
    assert main(["trace", str(log_dir), "-o", str(out), *options]) == 0
    content = json.loads(out.read_text())
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def recorded_with_stamps(log_dir: Path, arrivals: int = 60) -> Path:
    config = small_config(max_num_seqs=2)
    recorder = Recorder.open(log_dir, started(config), "full", Bounds(segment_bytes=4000, timestamped=True))
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


@pytest.mark.parametrize("timestamped", [True, False])
def test_a_trace_is_valid_and_nests(tmp_path, timestamped):
    log_dir = recorded_with_stamps(tmp_path / "log") if timestamped else record(tmp_path / "log", arrivals=60)
    events = traced(log_dir, tmp_path / "trace.json")
    for event in events:
        assert {"ph", "pid", "tid", "name"} | NEEDED[event["ph"]] <= set(event), event
        assert all(isinstance(event[name], (int, float)) for name in ("ts", "dur") if name in event)
        assert event["ph"] != "i" or event["s"] in "tpg"
    require_nested(events)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    assert {event["ph"] for event in events} == set(NEEDED)
    assert not timestamped or "not taken: sequences" in {event["name"] for event in events}


def test_what_it_shows_is_what_the_log_holds(tmp_path):
    config = small_config(page_count=16)
    log_dir = record(tmp_path / "log", config=config, arrivals=80, change=weighed)
    counts, events = info(open_log(log_dir)), traced(log_dir, tmp_path / "trace.json")
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["pid"] == 1]
    whole = [event for event in slices if event["name"].startswith("request ")]
    assert sorted(event["name"] for event in steps) == sorted(f"step {number}" for number in range(counts.steps))
    assert sorted(int(event["name"].split()[1]) for event in whole) == list(range(counts.requests))
    for event in whole:
        number = int(event["name"].split()[1])
        assert event["args"].get("client", f"{0:016x}") == f"{number % 3:016x}" and event["args"].get("weight", 1) == 1 + number % 3
    assert sum(event["args"]["samples"] for event in steps) == counts.sampled_tokens
    gave_way = [event for event in events if event["name"].startswith("gives way")]
    assert len(gave_way) == counts.preemptions > 0
    for event in events:
        if event["name"] == "cache blocks":
            assert sum(event["args"].values()) == config.page_count and min(event["args"].values()) >= 0
    reasons = Counter(event["name"].split(": ")[1] for event in events if event["name"].startswith("not taken"))
    assert reasons == changes_of_reasons(log_dir) and set(reasons) >= {"blocks", "order", "room", "budget"}


def weighed(events, state_digest, ranks):
    """Clients share turns by weights: under fcfs nothing else follows from them."""
    heavy = [msgspec.structs.replace(event, weight=1 + event.client) if isinstance(event, RequestArrived) else event for event in events]
    return heavy, state_digest, ranks


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
    log_dir = record(tmp_path / "log", config=small_config(pipeline_depth=1, page_count=400))
    chunks = [event["name"] for event in traced(log_dir, tmp_path / "trace.json") if " from " in event["name"]]
    computed = 0
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded) and isinstance(item.event, StepCommitted):
            scheduled = item.before.in_flight[0]
            computed += sum(count for id_, count in zip(scheduled.ids, scheduled.counts) if id_ in item.before.requests)
    assert sum(int(name.split()[0]) for name in chunks) == computed > 400


def test_stamps_are_times(tmp_path):
    events = traced(recorded_with_stamps(tmp_path / "log"), tmp_path / "trace.json")
    times = [event["ts"] for event in events if event["ph"] == "C"]
    assert times == sorted(times) and len(set(times)) > len(times) // 4


def test_a_phase_that_begins_at_an_unknown_time_has_no_chunk_of_the_last_known_one():
    """It began later than all that is known: a step that began just then computed for the phase before it."""
    drawn, lived = [], Lived(1, 0.0, False, "one")
    timeline = SimpleNamespace(
        _latest_us=5.0, _slice=lambda *_: None, _living={7: lived}, _writer=SimpleNamespace(put=drawn.append)
    )  # fmt: skip
    scheduled = StepInFlight(0, np.array([[7], [0], [3], [1]]), np.ones(1, dtype=bool), 1)
    for now_us, count in ((5.0, 1), (None, 0)):
        Timeline._phase(timeline, lived, now_us)
        Timeline._chunks(timeline, scheduled, 5.0, 9.0)
        assert len(drawn) == count
        drawn.clear()
    Timeline._chunks(timeline, scheduled, 5.5, 9.0)
    assert len(drawn) == 1


def test_bad_inputs_are_one_sentence(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    assert main(["trace", str(log_dir), "-o", str(tmp_path / "missing" / "trace.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing"), "-o", str(tmp_path / "trace.json")]) == 2


# ---- in runs -----------------------------------------------------------------------------------------------------


def by_event(log_dir: Path, each_chunk: bool = True) -> tuple[Traced, str]:
    """What is drawn of a log event by event."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vnext.replay.answers.trace.read", lambda segments, steady: read(segments))
        return trace(open_log(log_dir), text, "", each_chunk), text.getvalue()


def require_same_bytes(log_dir: Path, least_runs: int = 0, *, monkeypatch) -> None:
    """What is drawn in runs is what is drawn event by event, brief or not."""
    runs, meet = [], Timeline.meet_run
    monkeypatch.setattr(Timeline, "meet_run", lambda self, run: (runs.append(run.frames), meet(self, run))[1])
    for each_chunk in (True, False):
        in_runs, due = io.StringIO(), by_event(log_dir, each_chunk)
        assert not runs
        assert (trace(open_log(log_dir), in_runs, "", each_chunk), in_runs.getvalue()) == due
        assert len(runs) >= least_runs
        runs.clear()
    monkeypatch.setattr(Timeline, "meet_run", meet)


@pytest.mark.parametrize("batch", [2, 4, 12])
def test_a_busy_log_is_drawn_in_runs_as_event_by_event(tmp_path, monkeypatch, batch):
    """Requests wait for the cache, for their turn and for each other, and give way; times end before the log does."""
    make_log(tmp_path / "log", 1200, batch)
    require_same_bytes(tmp_path / "log", 5, monkeypatch=monkeypatch)
    assert batch == 2 or all(f"not taken: {why}" in by_event(tmp_path / "log")[1] for why in ("sequences", "blocks", "order"))
    timestamps = timestamps_path(next((tmp_path / "log").glob("*.vnextlog")))
    data = timestamps.read_bytes()
    timestamps.write_bytes(data[: data.rindex(BLOCK_MAGIC) + 40])  # a part of a block is none
    require_same_bytes(tmp_path / "log", 5, monkeypatch=monkeypatch)
    timestamps.unlink()
    require_same_bytes(tmp_path / "log", 5, monkeypatch=monkeypatch)


@pytest.mark.parametrize("seed", range(6))
def test_any_log_is_drawn_in_runs_as_event_by_event(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    config = drawn_config(rng)
    require_same_bytes(record(tmp_path / "log", "shape", config, seed, arrivals=60), monkeypatch=monkeypatch)
    require_same_bytes(record(tmp_path / "many", "full", config, seed, arrivals=60, size=3000), monkeypatch=monkeypatch)


def rewritten(log_dir: Path, begin: EngineStarted, frames: list[list[AnyEvent]]) -> Path:
    """The log of an engine that has begun so and written these frames."""
    recorder = Recorder.open(log_dir, begin, "full")
    for events in frames:
        recorder.append(events, (), 0)
    recorder.close()
    return log_dir


def test_decisions_that_are_not_the_schedulers_are_drawn_in_runs_too(tmp_path, monkeypatch):
    """Another configuration's decisions: nobody knows why a request waits for which there would be room."""
    make_log(tmp_path / "log", 1200, 12)
    log = open_log(tmp_path / "log")
    begin, frames = log.header.started, [list(item.events) for item in log.items() if isinstance(item, Frame)]
    roomier = msgspec.structs.replace(begin.config, page_count=begin.config.page_count + 5)
    rewritten(tmp_path / "roomier", msgspec.structs.replace(begin, config=roomier), frames)
    assert all(f"not taken: {why}" in by_event(tmp_path / "roomier")[1] for why in ("unknown", "blocks"))
    require_same_bytes(tmp_path / "roomier", 5, monkeypatch=monkeypatch)


def rewritten_in_a_roomier_cache(log_dir: Path, blocks: int, comes: int) -> Path:
    """One of two running requests writes what a third, which waits for blocks since step `comes`, has as its prompt:
    each block that
    it fills is one that the third lacks no more. The frames are those of a cache with a block less than the log says."""
    config, prompt, answer = (
        config_of(page_count=blocks, max_num_batched_tokens=64, pipeline_depth=4),
        [1, 2, 3, 4, 5],
        [*range(10, 50)],
    )
    begin, frames = started_with(config), []
    state, coming = start(begin), {0: (0, prompt), 1: (1, [*range(60, 71)]), comes: (2, [*prompt, *answer])}
    while len(state.rows) < 3 and state.committed < 30:
        events: list[AnyEvent] = []
        if len(state.in_flight) == config.pipeline_depth:
            tokens = [answer[state.in_flight[0].step], 99][: int(state.in_flight[0].samples.sum())]
            events.append(StepCommitted(step=state.committed, tokens=pack_tokens(tokens)))
        if (came := coming.pop(state.planned, None)) is not None:
            events.append(arrival_of(*came, 10 if came[0] == 2 else 40))
        for event in events:
            state = reduce(state, event)
        events.append(schedule(state))
        state = reduce(state, events[-1])
        frames.append(events)
    roomier = msgspec.structs.replace(config, page_count=blocks + 1)
    return rewritten(log_dir, msgspec.structs.replace(begin, config=roomier), frames)


def test_a_wait_that_only_a_roomier_cache_would_end_is_drawn_event_by_event(tmp_path, monkeypatch):
    """The first that waits could be admitted in some of the steps: nobody knows why it was not."""
    log_dir = rewritten_in_a_roomier_cache(tmp_path / "log", 17, 7)
    assert all(by_event(log_dir)[1].count(f"not taken: {why}") > 2 for why in ("unknown", "blocks"))
    require_same_bytes(log_dir, monkeypatch=monkeypatch)


@pytest.mark.parametrize("frame", [200, 401, 555])
def test_a_log_that_cannot_have_happened_is_drawn_as_far_as_event_by_event(tmp_path, monkeypatch, frame):
    make_log(tmp_path / "log", 600, 4)
    log = open_log(tmp_path / "log")
    frames = [list(item.events) for item in log.items() if isinstance(item, Frame)]
    frames[frame].pop()
    rewritten(tmp_path / "broken", log.header.started, frames)
    require_same_bytes(tmp_path / "broken", monkeypatch=monkeypatch)
    assert "refuses" in by_event(tmp_path / "broken")[0].ended
