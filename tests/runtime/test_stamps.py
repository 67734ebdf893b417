"""Stamps beside segments: one for each frame with events, gone with their segment, worth no trouble when the disk fails."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from log_drive import record

from vnext.replay.cli import main
from vnext.replay.source import open_log
from vnext.replay.step_times import recorded as times_taken
from vnext.replay.times import Clock, stamps_of
from vnext.replay.verify import verify
from vnext.runtime import stamps as stamp_files
from vnext.runtime.stamps import stamps_path
from vnext.state.log import Frame
from vnext.state.stamps import MAGIC, RECORD_SIZE, Stamper, block_head, block_start, head, parse, stamp


def recorded(log_dir: Path, arrivals: int = 60, **bounds: int) -> Path:
    return record(log_dir, "shape", arrivals=arrivals, stamped=True, **bounds)


def test_every_frame_has_its_stamp_in_every_segment(tmp_path):
    log = open_log(recorded(tmp_path / "log", size=2000))
    stamps = stamps_of(log)
    ends = [item.first_event + len(item.events) for item in log.items() if isinstance(item, Frame) and item.events]
    assert len(log.paths) >= 3 and stamps.events.tolist() == ends
    assert (np.diff(stamps.times_ns) >= 0).all() and verify(log).same
    assert stamps.busy_ns == {step: 1000 * (1 + step % 5) for step in range(len(stamps.busy_ns))} and len(stamps.busy_ns) > 20
    clock = Clock(stamps)
    times = [clock.of(number, 0) for number in range(1, ends[-1])]
    assert times == sorted(times) and times[0] == 0.0
    assert times[-1] == (stamps.times_ns[-1] - stamps.times_ns[0]) / 1000


def test_the_ring_deletes_them_with_their_segments(tmp_path):
    log_dir = recorded(tmp_path / "log", arrivals=200, size=2000, max_bytes=9000)
    names = {path.stem for path in log_dir.glob("*.vnextlog")}
    assert names == {path.stem for path in log_dir.glob("*.vnexttimes")} and "segment-000000" not in names
    assert stamps_of(open_log(log_dir)) is not None


def test_a_log_without_stamps_has_a_clock_of_steps(tmp_path):
    log = open_log(record(tmp_path / "log"))
    assert stamps_of(log) is None and Clock(None).of(7, 12) == 12_000.0


def packed(frames: list[tuple[int, int]], results: dict[int, list[tuple[int, int]]]) -> bytes:
    """Frames (event behind, us) and before each of them results (step, us)."""
    stamper = Stamper(10**18)
    for place, (event, now_us) in enumerate(frames):
        for step, busy_us in results.get(place, ()):
            stamper.took(step, busy_us)
        stamper.add(event, now_us)
        if place % 7 == 6:
            stamper.end_block()
    stamper.end_block()
    return bytes(stamper.data)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_packed_is_read(seed):
    """Frames of many events, idle hours, steps of minutes, several results before one frame, steps that have none."""
    chance = random.Random(seed)
    event = now_us = step = 0
    frames, results, busy = [], {}, {}
    for place in range(200):
        event += chance.choice((1, 2, 2, 2, 9, 1022, 1023, 1024, 5000, 2**33))
        now_us += chance.choice((0, 1, 900, 2**26, 2**27 - 1, 2**27, 2**40))
        step += chance.choice((0, 0, 0, 1, 300))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            busy[step] = chance.choice((1, 400, 2**27 - 1, 2**27, 2**30))
            results.setdefault(place, []).append((step, busy[step]))
            step += 1
        frames.append((event, now_us))
    found = parse(packed(frames, results))
    assert list(zip(found.events.tolist(), (found.times_ns // 1000).tolist())) == frames
    assert found.busy_ns == {step: 1000 * busy_us for step, busy_us in busy.items()}
    assert found.wall_minus_monotonic_ns == 10**18


def test_a_steady_step_takes_eight_bytes():
    frames = [(2 * step + 2, 900 * step) for step in range(7000)]
    size = len(packed(frames, {step: [(step, 700)] for step in range(7000)}))
    blocks = 1000
    assert size == 7000 * RECORD_SIZE + blocks * (block_start.size + block_head.size)


def test_whatever_happens_to_a_file_its_stamps_are_true_or_gone():
    """Cut and flipped at every byte, both forms: the rest are the first ones that were written."""
    frames = [(place + 2, 10 * place) for place in range(20)]
    now = packed(frames, {place: [(place, 9)] for place in range(20)})
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


def test_a_log_that_was_made_of_another_keeps_its_times(tmp_path):
    """cut and merge give the stamps again; what-if has what it needs."""
    one = recorded(tmp_path / "one", arrivals=120)
    stamps = stamps_of(open_log(one))
    for name, steps in (("first", ("0", "40")), ("second", ("40",))):
        assert main(["cut", str(one), *steps, "-o", str(tmp_path / name)]) == 0
    assert main(["merge", str(tmp_path / "second"), str(tmp_path / "first"), "-o", str(tmp_path / "merged")]) == 0
    again = stamps_of(open_log(tmp_path / "merged"))
    assert again.events.tolist() == stamps.events.tolist() and again.busy_ns == stamps.busy_ns
    assert (again.times_ns // 1000 == stamps.times_ns // 1000).all()
    assert 0 < len(stamps_of(open_log(tmp_path / "second")).events) < len(stamps.events)


def test_the_last_second_of_a_killed_engine_has_no_times(tmp_path):
    """The newest segment has none, or the last frames of it; a hole in the middle leaves none at all."""
    log = open_log(recorded(tmp_path / "log", arrivals=120, size=2000))
    last, before = stamps_path(log.paths[-1]), stamps_path(log.paths[-2])
    known = len(stamps_of(log).events) - len(parse(last.read_bytes()).events)
    last.unlink()
    stamps = stamps_of(log)
    assert len(stamps.events) == known and Clock(stamps).of(10**6, 0) == (stamps.times_ns[-1] - stamps.times_ns[0]) / 1000
    taken = times_taken(log)
    assert len(taken.events) == stamps.events[-1] - 1 and (taken.step_us > 0).all() and taken.overhead_us > 0
    before.write_bytes(b"")
    assert stamps_of(log) is not None, "two at the end are an end, too"
    stamps_path(log.paths[1]).unlink()
    assert stamps_of(log) is None


def test_a_disk_that_fails_costs_stamps_only(tmp_path, monkeypatch):
    opened = os.open

    def failing(path, *rest):
        if str(path).endswith(".vnexttimes"):
            raise OSError("no space left")
        return opened(path, *rest)

    monkeypatch.setattr(stamp_files.os, "open", failing)
    log = open_log(recorded(tmp_path / "log"))
    assert verify(log).same and stamps_of(log) is None
