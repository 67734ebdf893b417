"""What a log holds is counted from its newest segment alone, and is what a whole reading counts, whatever end a kill has left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from log_drive import engine, small_config, started

from vnext.log import codec
from vnext.log.codec import Frame, SegmentStart
from vnext.log.compression import Content
from vnext.log.reading import read
from vnext.runtime.record.held import frames_held
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.digest import digest

CONFIG = small_config()
GOLDEN = Path(__file__).parents[2] / "golden" / "logs"


def counted(log_dir: Path) -> int:
    """The frames of a reading of every segment."""
    items = read(path.read_bytes() for path in sorted(log_dir.glob("*.vnextlog")))
    return sum(isinstance(item, Frame) for item in items)


@pytest.fixture
def log(tmp_path: Path) -> list[Path]:
    """The segments of a log of which the oldest one is deleted."""
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(segment_bytes=700))
    for events, befores, after, ranks in engine(CONFIG, 1, 120):
        recorder.append(events, befores, digest(after), ranks)
    recorder.close()
    oldest, *paths = sorted(tmp_path.glob("*.vnextlog"))
    oldest.unlink()
    assert len(paths) > 3
    return paths


def test_the_newest_segment_and_a_header_are_enough(log, monkeypatch):
    taken, whole = [], Content.read
    monkeypatch.setattr(Content, "read", lambda content, at=0, count=None: taken.append(data := whole(content, at, count)) or data)
    assert frames_held(log[0].parent) == counted(log[0].parent) > 20
    header = next(iter(read([log[0].read_bytes()]))).header
    head = len(codec.open_segment(header)[0])
    assert sum(map(len, taken)) == log[-1].stat().st_size + head + 16 < sum(path.stat().st_size for path in log) / 2


def test_a_torn_tail_counts_as_in_a_whole_reading(log):
    """Wherever it is torn: in a frame, in the newest segment's header, or before its first byte."""
    data = log[-1].read_bytes()
    for size in range(0, len(data), 7):
        log[-1].write_bytes(data[:size])
        assert frames_held(log[0].parent) == counted(log[0].parent), size


def test_a_flipped_tail_counts_as_in_a_whole_reading(log):
    data, rng = log[-1].read_bytes(), random.Random(7)
    for _ in range(200):
        at = rng.randrange(len(data))
        log[-1].write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        assert frames_held(log[0].parent) == counted(log[0].parent), at


def test_a_log_whose_beginning_cannot_be_read_holds_nothing(log, tmp_path):
    log[0].write_bytes(b"vnextLOG" + bytes(30))
    assert frames_held(tmp_path) == counted(tmp_path) == frames_held(tmp_path / "none") == frames_held("") == 0


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_logs_of_earlier_versions_are_counted_whole(name):
    assert frames_held(GOLDEN / name) == counted(GOLDEN / name) > 0


def test_each_header_says_how_many_frames_came_before_it(tmp_path):
    recorder, frames = Recorder.open(tmp_path, started(CONFIG), "shape", Bounds(segment_bytes=700)), 0
    for events, befores, after, ranks in engine(CONFIG, 2, 60):
        recorder.append(events, befores, digest(after), ranks)
    for item in read(path.read_bytes() for path in sorted(tmp_path.glob("*.vnextlog"))):
        frames += isinstance(item, Frame)
        assert not isinstance(item, SegmentStart) or item.header.frames_before == frames
    assert frames > 40
