"""Stamps beside segments: one for each frame, gone with their segment, worth no trouble when the disk fails."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from log_drive import engine, record, small_config, started

from vnext.replay.source import open_log
from vnext.replay.times import Clock, stamps_of
from vnext.replay.verify import verify
from vnext.runtime import stamps as stamp_files
from vnext.runtime.recorder import Recorder
from vnext.runtime.segments import Bounds
from vnext.state.digest import digest
from vnext.state.log import Frame
from vnext.state.stamps import MAGIC, head, parse, stamp


def recorded(log_dir: Path, arrivals: int = 60, **bounds: int) -> Path:
    recorder = Recorder.open(log_dir, started(small_config()), "shape", Bounds(stamped=True, **bounds))
    for events, befores, after, ranks in engine(small_config(), 1, arrivals):
        recorder.append(events, befores, digest(after), ranks)
    recorder.close()
    return log_dir


def test_every_frame_has_its_stamp_in_every_segment(tmp_path):
    log = open_log(recorded(tmp_path / "log", segment_bytes=2000))
    stamps = stamps_of(log)
    ends = [item.first_event + len(item.events) for item in log.items() if isinstance(item, Frame)]
    assert len(log.paths) >= 3 and stamps.events.tolist() == ends
    assert (np.diff(stamps.times_ns) > 0).all() and verify(log).same
    clock = Clock(stamps)
    times = [clock.of(number, 0) for number in range(1, ends[-1])]
    assert times == sorted(times) and times[0] == 0.0
    assert times[-1] == (stamps.times_ns[-1] - stamps.times_ns[0]) / 1000


def test_the_ring_deletes_them_with_their_segments(tmp_path):
    log_dir = recorded(tmp_path / "log", arrivals=200, segment_bytes=2000, max_bytes=9000)
    names = {path.stem for path in log_dir.glob("*.vnextlog")}
    assert names == {path.stem for path in log_dir.glob("*.vnexttimes")} and "segment-000000" not in names
    assert stamps_of(open_log(log_dir)) is not None


def test_a_log_without_stamps_has_a_clock_of_steps(tmp_path):
    log = open_log(record(tmp_path / "log"))
    assert stamps_of(log) is None and Clock(None).of(7, 12) == 12_000.0


def test_a_torn_or_foreign_file_is_less_or_nothing(tmp_path):
    data = head.pack(MAGIC, 10**18, 7) + stamp.pack(3, 10) + stamp.pack(5, 20)
    for size in range(len(data) + 1):
        found = parse(data[:size])
        assert found is None if size < head.size else len(found.events) == (size - head.size) // stamp.size
    assert parse(data).wall_minus_monotonic_ns == 10**18 - 7
    assert parse(b"nothing of the kind, long enough") is None
    backwards = parse(data + stamp.pack(4, 30) + stamp.pack(9, 40))
    assert backwards.events.tolist() == [3, 5]


def test_a_disk_that_fails_costs_stamps_only(tmp_path, monkeypatch):
    opened = os.open

    def failing(path, *rest):
        if str(path).endswith(".vnexttimes"):
            raise OSError("no space left")
        return opened(path, *rest)

    monkeypatch.setattr(stamp_files.os, "open", failing)
    log = open_log(recorded(tmp_path / "log"))
    assert verify(log).same and stamps_of(log) is None
