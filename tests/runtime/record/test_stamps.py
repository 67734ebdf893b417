"""Stamps beside segments: one for each frame with events, gone with their segment, worth no trouble when the disk fails."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from log_drive import record

from vnext.log.codec import Frame
from vnext.log.timestamps import (
    MAGIC,
    RECORD_SIZE,
    TimestampEncoder,
    Timestamps,
    ascending,
    block_head,
    block_start,
    head,
    parse,
    stamp,
)
from vnext.replay.cli.main import main
from vnext.replay.futures.recording import recorded as times_taken
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.verify import verify
from vnext.runtime.record import timestamp_file as timestamp_files
from vnext.runtime.record.timestamp_file import timestamps_path
from vnext.state.events import StepCommitted


def recorded(log_dir: Path, arrivals: int = 60, **bounds: int) -> Path:
    return record(log_dir, "shape", arrivals=arrivals, timestamped=True, **bounds)


def test_every_frame_has_its_stamp_in_every_segment(tmp_path):
    log = open_log(recorded(tmp_path / "log", size=2000))
    timestamps = timestamps_of(log)
    ends = [item.first_event + len(item.events) for item in log.items() if isinstance(item, Frame) and item.events]
    assert len(log.paths) >= 3 and timestamps.events.tolist() == ends
    assert (np.diff(timestamps.times_ns) >= 0).all() and verify(log).same
    assert (
        timestamps.busy_ns == {step: 1000 * (1 + step % 5) for step in range(len(timestamps.busy_ns))}
        and len(timestamps.busy_ns) > 20
    )
    clock = Clock(timestamps)
    times = [clock.known_us(end, 0) for end in ends]
    assert times == sorted(times) and times[0] == 0.0
    assert times[-1] == (timestamps.times_ns[-1] - timestamps.times_ns[0]) / 1000


def test_the_ring_deletes_them_with_their_segments(tmp_path):
    log_dir = recorded(tmp_path / "log", arrivals=200, size=2000, max_bytes=9000)
    names = {path.stem for path in log_dir.glob("*.vnextlog")}
    assert names == {path.stem for path in log_dir.glob("*.vnexttimes")} and "segment-000000" not in names
    assert timestamps_of(open_log(log_dir)) is not None


def test_a_log_without_stamps_has_a_clock_of_steps(tmp_path):
    log = open_log(record(tmp_path / "log"))
    assert timestamps_of(log) is None and Clock(None).known_us(7, 12) == 12_000.0


def compressed(frames: list[tuple[int, int]], results: dict[int, list[tuple[int, int]]]) -> bytes:
    """Frames (event behind, us) and before each of them results (step, us)."""
    timestamp_encoder = TimestampEncoder(10**18)
    for place, (event, now_us) in enumerate(frames):
        for step, busy_us in results.get(place, ()):
            timestamp_encoder.took(step, busy_us)
        timestamp_encoder.add(event, now_us)
        if place % 7 == 6:
            timestamp_encoder.end_block()
    timestamp_encoder.end_block()
    return bytes(timestamp_encoder.data)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_packed_is_read(seed):
    """Frames of many events, idle hours, steps of minutes, several results before one frame, steps that have none."""
    rng = random.Random(seed)
    event = now_us = step = 0
    frames, results, busy = [], {}, {}
    for place in range(200):
        event += rng.choice((1, 2, 2, 2, 9, 1022, 1023, 1024, 5000, 2**33))
        now_us += rng.choice((0, 1, 900, 2**26, 2**27 - 1, 2**27, 2**40))
        step += rng.choice((0, 0, 0, 1, 300))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            busy[step] = rng.choice((1, 400, 2**27 - 1, 2**27, 2**30))
            results.setdefault(place, []).append((step, busy[step]))
            step += 1
        frames.append((event, now_us))
    found = parse(compressed(frames, results))
    assert list(zip(found.events.tolist(), (found.times_ns // 1000).tolist())) == frames
    assert found.busy_ns == {step: 1000 * busy_us for step, busy_us in busy.items()}
    assert found.wall_minus_monotonic_ns == 10**18


def test_a_steady_step_takes_eight_bytes():
    frames = [(2 * step + 2, 900 * step) for step in range(7000)]
    size = len(compressed(frames, {step: [(step, 700)] for step in range(7000)}))
    blocks = 1000
    assert size == 7000 * RECORD_SIZE + blocks * (block_start.size + block_head.size)


def test_whatever_happens_to_a_file_its_stamps_are_true_or_gone():
    """Cut and flipped at every byte, both forms: the rest are the first ones that were written."""
    frames = [(place + 2, 10 * place) for place in range(20)]
    now = compressed(frames, {place: [(place, 9)] for place in range(20)})
    before = head.pack(MAGIC, 10**18, 7) + b"".join(stamp.pack(event, 1000 * us) for event, us in frames)
    for data in (now, before):
        whole = parse(data)
        assert list(zip(whole.events.tolist(), (whole.times_ns // 1000).tolist())) == frames
        for size in range(len(data)):
            found = parse(data[:size])
            count = 0 if found is None else len(found.events)
            assert count <= 20 and (found is None or found.events.tolist() == whole.events[:count].tolist())
    for place in range(len(now)):
        found = parse(now[:place] + bytes([now[place] ^ 1 << place % 8]) + now[place + 1 :])
        count = 0 if found is None else len(found.events)
        assert count < 20 and (found is None or found.times_ns.tolist() == parse(now).times_ns[:count].tolist())
    assert parse(b"nothing of the kind, long enough") is None and parse(b"") is None
    assert parse(before).wall_minus_monotonic_ns == 10**18 - 7
    backwards = parse(before + stamp.pack(4, 30) + stamp.pack(99, 40))
    assert backwards.events.tolist() == whole.events.tolist()


def test_times_never_go_backwards_from_one_segment_to_the_next(tmp_path):
    """Those of the one that does, and all behind it, are left out."""
    log = open_log(record(tmp_path / "log", arrivals=60, size=4000))
    for path in log.paths:
        timestamps_path(path).write_bytes(compressed([(number, 10 * number) for number in range(2, 9)], {}))
    assert len(log.paths) > 2 and timestamps_of(log).events.tolist() == [*range(2, 9)]
    first, empty, late = (Timestamps(np.array(each), np.array(each), 0, {}) for each in ([2, 4], [], [6, 8]))
    assert ascending([first, empty, first, late]) == [first, empty] and ascending([first, empty, late]) == [first, empty, late]


def test_a_log_that_was_made_of_another_keeps_its_times(tmp_path):
    """cut and merge give the stamps again; what-if has what it needs."""
    one = recorded(tmp_path / "one", arrivals=120)
    timestamps = timestamps_of(open_log(one))
    for name, steps in (("first", ("0", "40")), ("second", ("40",))):
        assert main(["cut", str(one), *steps, "-o", str(tmp_path / name)]) == 0
    assert main(["merge", str(tmp_path / "second"), str(tmp_path / "first"), "-o", str(tmp_path / "merged")]) == 0
    again = timestamps_of(open_log(tmp_path / "merged"))
    assert again.events.tolist() == timestamps.events.tolist() and again.busy_ns == timestamps.busy_ns
    assert (again.times_ns // 1000 == timestamps.times_ns // 1000).all()
    assert 0 < len(timestamps_of(open_log(tmp_path / "second")).events) < len(timestamps.events)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from log_drive import as_it_is, record
def change(events, state_digest, ranks):
    change.frames += 1
    if change.frames == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return as_it_is(events, state_digest, ranks)
change.frames = 0
record(Path(sys.argv[1]), "shape", arrivals=60, timestamped=True, size=2000, change=change)
"""


@pytest.mark.parametrize("block_frames", [512, 5])
@pytest.mark.parametrize("frames", [2, 9, 57, 58, 59, 90])
def test_a_killed_engine_has_the_times_of_all_that_it_wrote(tmp_path, frames, block_frames):
    """SIGKILL with blocks ended and open, in any segment."""
    code = f"from vnext.runtime.record import timestamp_file as stamps; stamps.BLOCK_FRAMES = {block_frames}\n{KILLED}"
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log"), str(frames), *paths], timeout=60)
    assert done.returncode == -signal.SIGKILL
    log = open_log(tmp_path / "log")
    ends = [item.first_event + len(item.events) for item in log.items() if isinstance(item, Frame) and item.events]
    timestamps = timestamps_of(log)
    assert timestamps.events.tolist() == ends and len(ends) >= frames - 3
    steps = sum(isinstance(event, StepCommitted) for item in log.items() if isinstance(item, Frame) for event in item.events)
    assert timestamps.busy_ns.keys() >= set(range(steps)), "the next step's result may be there already"


@pytest.mark.parametrize("first", [0, 1, 6])
def test_what_is_open_behind_blocks_counts_as_far_as_it_is_whole(first):
    """And what an older, longer end has left behind it does not."""
    frames = [(place + 2, 10 * place) for place in range(20)]
    blocks = compressed(frames[:first], {}) if first else b""
    opened = head.pack(MAGIC, 10**18, 0) + b"".join(stamp.pack(event, 1000 * us) for event, us in frames[first:])
    for size in range(len(opened)):
        found = parse(blocks + opened[:size])
        count = first + max(0, size - head.size) // stamp.size
        assert (0 if found is None else len(found.events)) == count
        assert not count or found.events.tolist() == [event for event, _ in frames[:count]]
    for left in (opened[7:], opened[head.size :], bytes(40)):
        assert parse(compressed(frames, {}) + left).events.tolist() == [event for event, _ in frames]


def test_a_log_whose_last_frames_have_no_times_says_so(tmp_path, capsys):
    """A disk that failed for the stamps alone: never 0 ms, and nothing drawn where it was not."""
    log_dir = recorded(tmp_path / "log", arrivals=120)
    path = next(log_dir.glob("*.vnexttimes"))
    whole = parse(path.read_bytes())
    path.write_bytes(head.pack(MAGIC, 10**18, 0) + b"".join(
        stamp.pack(event, 1000 * event) for event in whole.events[: len(whole.events) // 2].tolist()
    ))  # fmt: skip
    assert main(["convert", str(log_dir), "--to", "vllm-vcr", "-o", str(tmp_path / "vcr")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "vcr").read_text().splitlines()[1:]]
    known = [line for line in lines if line["ttft_ms"] is not None]
    assert 0 < len(known) < len(lines) and all(line["ttft_ms"] > 0 for line in known)
    between = [ms for line in lines for ms in line.get("itl_ms") or ()]
    assert None in between and all(ms > 0 for ms in between if ms is not None)
    assert main(["convert", str(tmp_path / "vcr"), "--to", "mooncake", "-o", str(tmp_path / "mooncake")]) == 0
    capsys.readouterr()
    assert main(["trace", str(log_dir), "-o", str(tmp_path / "trace"), "--json"]) == 0
    reported, events = json.loads(capsys.readouterr().out), json.loads((tmp_path / "trace").read_text())["traceEvents"]
    drawn = [event for event in events if event.get("name", "").startswith("step ")]
    assert reported["untimed"] > 0 and 0 < reported["steps"] and all(event["dur"] > 0 for event in drawn)
    assert any(event.get("args", {}).get("finish") == "alive where the times end" for event in events)


def test_a_log_without_times_tells_none(tmp_path, capsys):
    """Null and a dash, and never 0 ms."""
    log_dir = record(tmp_path / "log")
    assert main(["stat", str(log_dir), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["seconds"] is reported["tokens_per_s"] is None and reported["step_us"] == []
    assert main(["stat", str(log_dir)]) == 0 and "0.0" not in capsys.readouterr().out.split("time")[1].splitlines()[0]
    timestamped = recorded(tmp_path / "stamped", arrivals=3)
    next(timestamped.glob("*.vnexttimes")).write_bytes(
        head.pack(MAGIC, 10**18, 0) + stamp.pack(2, 5)
    )  # of the first frame alone
    assert main(["slow", str(timestamped), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["medians"] == [None, None, None] and reported["counts"] == [0, 0, 0]
    assert main(["slow", str(timestamped)]) == 0 and "0 in total, median -" in capsys.readouterr().out


def test_the_last_second_of_an_older_log_has_no_times(tmp_path):
    """The newest segment has none, or the last frames of it; a file lost in the middle leaves a hole."""
    log = open_log(recorded(tmp_path / "log", arrivals=120, size=2000))
    last, before = timestamps_path(log.paths[-1]), timestamps_path(log.paths[-2])
    known = len(timestamps_of(log).events) - len(parse(last.read_bytes()).events)
    last.unlink()
    timestamps = timestamps_of(log)
    assert len(timestamps.events) == known and Clock(timestamps).known_us(10**6, 0) is None
    taken = times_taken(log)
    assert len(taken.events) == timestamps.events[-1] - 1 and (taken.step_us > 0).all() and taken.overhead_us.max() > 0
    before.write_bytes(b"")
    assert timestamps_of(log) is not None, "two at the end are an end, too"
    timestamps_path(log.paths[1]).unlink()
    assert set(timestamps_of(log).events) < set(timestamps.events), "a hole"


def test_a_disk_that_fails_costs_stamps_only(tmp_path, monkeypatch):
    opened = os.open

    def failing(path, *rest):
        if str(path).endswith(".vnexttimes"):
            raise OSError("no space left")
        return opened(path, *rest)

    monkeypatch.setattr(timestamp_files.os, "open", failing)
    log = open_log(recorded(tmp_path / "log"))
    assert verify(log).same and timestamps_of(log) is None


def test_stamps_that_have_only_begun_are_none_yet():
    found = parse(head.pack(MAGIC, 10**18, 7))
    assert found is not None and len(found.events) == 0 and found.wall_minus_monotonic_ns == 10**18 - 7
    assert parse(head.pack(MAGIC, 10**18, 7)[:-1]) is None
