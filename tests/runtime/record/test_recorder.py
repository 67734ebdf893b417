"""The recorder: what it wrote is read back, a failing disk costs frames and nothing else, segments are a ring."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from log_drive import engine, small_config, started
from msgspec.structs import replace

from vnext.base.version import __version__
from vnext.log import codec
from vnext.log.codec import Frame, LogEnd, SegmentStart
from vnext.log.reading import read
from vnext.replay.cli.main import main as replay
from vnext.replay.console.ended import ended
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify
from vnext.runtime.record import segments
from vnext.runtime.record.recorder import LogLost, Recorder
from vnext.runtime.record.segments import Bounds, LogUnwritable
from vnext.state.digest import digest
from vnext.state.events import StepPlanned
from vnext.state.reduce import start

CONFIG = small_config()


def items(log_dir: Path) -> list:
    return list(read(path.read_bytes() for path in sorted(log_dir.glob("*.vnextlog"))))


def record(recorder: Recorder, seed: int = 1, arrivals: int = 20) -> list:
    """Record a small engine's life; returns its events."""
    every = []
    for events, befores, after, ranks in engine(CONFIG, seed, arrivals):
        recorder.append(events, befores, digest(after), ranks)
        every += events
    return every


def test_a_full_log_holds_the_events_themselves(tmp_path):
    recorder = Recorder.open(tmp_path / "log", started(CONFIG), "full")
    events = record(recorder)
    start_item, *frames, end = items(tmp_path / "log")
    assert start_item.header.started == started(CONFIG) and start_item.header.privacy == "full"
    assert [event for frame in frames for event in frame.events] == events and end.kind == "complete"
    assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) == recorder.bytes_written
    assert any(frame.rank_digests for frame in frames)
    recorder.close()


def test_every_frame_is_on_disk_before_append_returns(tmp_path):
    recorder = Recorder.open(tmp_path, started(CONFIG), "full")
    count = 0
    for events, befores, after, ranks in engine(CONFIG, 2, 5):
        recorder.append(events, befores, digest(after), ranks)
        count += 1
        assert sum(isinstance(item, Frame) for item in items(tmp_path)) == count


def test_a_shape_log_holds_no_text(tmp_path):
    recorder = Recorder.open(tmp_path, started(CONFIG), "shape")
    events = record(recorder)
    frames = [item for item in items(tmp_path) if isinstance(item, Frame)]
    found = [event for frame in frames for event in frame.events]
    assert [type(event) for event in found] == [type(event) for event in events]
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_two_starts_use_two_keys(tmp_path):
    logs = []
    for name in ("a", "b"):
        record(Recorder.open(tmp_path / name, started(CONFIG), "shape"))
        logs.append([frame.body for frame in items(tmp_path / name) if isinstance(frame, Frame)])
    assert logs[0] != logs[1]


def test_segments_roll_over_by_size_and_chain(tmp_path):
    whole = Recorder.open(tmp_path / "one", started(CONFIG), "full")
    rolled = Recorder.open(tmp_path / "many", started(CONFIG), "full", Bounds(segment_bytes=700))
    assert record(whole, arrivals=80) == record(rolled, arrivals=80)
    starts = [item for item in items(tmp_path / "many") if isinstance(item, SegmentStart)]
    assert len(starts) > 3 and [item.header.index for item in starts] == list(range(len(starts)))
    assert items(tmp_path / "many")[-1].kind == "complete"
    frames = [[item for item in items(tmp_path / name) if isinstance(item, Frame)] for name in ("one", "many")]
    assert [each.body for each in frames[0]] == [each.body for each in frames[1]]


def test_two_runs_that_decide_alike_write_the_same_bytes(tmp_path):
    """No time gets into a segment: chained digests are equal from the first frame to the last."""
    for name in ("one", "two"):
        record(
            Recorder.open(tmp_path / name, started(CONFIG), "full", Bounds(segment_bytes=2000, timestamped=True)),
            arrivals=60,
        )
    one, two = ([path.read_bytes() for path in sorted((tmp_path / name).glob("*.vnextlog"))] for name in ("one", "two"))
    assert one == two and len(one) > 2


def test_off_writes_nothing(tmp_path):
    recorder = Recorder.open(tmp_path / "log", started(CONFIG), "off")
    record(recorder)
    assert recorder.bytes_written == 0 and not (tmp_path / "log").exists()
    recorder.close()


def test_a_directory_that_cannot_be_used_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogUnwritable, match="choose another one with --log-dir, or switch"):
        Recorder.open(tmp_path / "file" / "log", started(CONFIG), "full")
    Recorder.open(tmp_path / "log", started(CONFIG), "full").close()
    with pytest.raises(LogUnwritable, match="holds a log already"):
        Recorder.open(tmp_path / "log", started(CONFIG), "full")


class FailingDisk:
    """os.write that fails for some calls: not at all written, or half."""

    def __init__(self, monkeypatch, bad: range, half: bool) -> None:
        self.calls, self.bad, self.half, self.write = 0, bad, half, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        self.calls += 1
        if self.calls - 1 not in self.bad:
            return self.write(fd, data)
        if self.half:
            return self.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("segment_bytes", [700, 2**20])
def test_a_full_disk_leaves_a_gap_that_the_log_admits(tmp_path, monkeypatch, caplog, half, segment_bytes):
    recorder = Recorder.open(tmp_path, started(CONFIG), "shape", Bounds(segment_bytes=segment_bytes))
    disk = FailingDisk(monkeypatch, range(5, 8), half)
    events = record(recorder)
    found = items(tmp_path)
    frames = [item for item in found if isinstance(item, Frame)]
    assert found[-1].kind == "complete" and recorder.frames_lost == 3 and recorder.failure
    assert [frame.lost for frame in frames if frame.lost] == [3] and disk.calls > 20
    last = frames[-1]
    assert last.first_event + len(last.events) == len(events) + 1
    recorder.close()
    begun, ended = caplog.messages  # one word for all three frames, and one at the end
    assert begun.startswith("the log is not written at present, frames are lost: ") and "the log lacks 3 frames: " in ended


def full_at(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A disk on which no file gets longer: what still fits is written, as the system does it."""
    write = os.write

    def write_what_fits(fd: int, data: bytes) -> int:
        room = size - os.fstat(fd).st_size
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[:room])

    monkeypatch.setattr(os, "write", write_what_fits)


def test_a_disk_that_stays_full_is_told_in_the_last_frame(tmp_path, monkeypatch):
    """At any byte; the last good frame gives way where there is no other room."""
    whole = Recorder.open(tmp_path / "whole", started(CONFIG), "full")
    events, given_up = record(whole, arrivals=4), 0
    header = len(codec.open_segment(replace(codec.first_header(started(CONFIG), "full", __version__), closes=True))[0])
    for size in range(header + 100, whole.bytes_written - 200, 23):
        recorder = Recorder.open(tmp_path / str(size), started(CONFIG), "full")
        with monkeypatch.context() as patch:
            full_at(patch, size)
            record(recorder, arrivals=4)
            lost = recorder.frames_lost
            recorder.close()
        given_up += recorder.frames_lost - lost
        *frames, last, end = items(tmp_path / str(size))[1:]
        assert end.kind == "complete" and last.lost > 0 and not last.events
        assert sum(frame.lost for frame in (*frames, last)) == recorder.frames_lost
        assert all(frame.events == tuple(events[frame.first_event - 1 :][: len(frame.events)]) for frame in frames)
        assert ended(open_log(tmp_path / str(size))).line.startswith("frames lost: ")
    assert given_up > 0


FILL = """
import os, resource, sys
from pathlib import Path
from test_recorder import CONFIG, record, started
from vnext.runtime.record.recorder import Recorder
recorder = Recorder.open(sys.argv[1], started(CONFIG), "shape")
resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2**20))
record(recorder, arrivals=40)
why = recorder.failure
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "room again":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
recorder.close()
print(recorder.frames_lost, why)
"""


def fill(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join(path for path in sys.path if path)
    command, environment = [sys.executable, "-c", FILL, folder, end], {**os.environ, "PYTHONPATH": folders}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_file_that_the_system_lets_grow_no_further_is_a_log_that_says_so(tmp_path):
    done = fill(tmp_path, "closed")
    lost, _, why = done.stdout.partition(" ")
    assert int(lost) > 10 and ("File too large" in why or "bytes were written" in why), done.stderr
    assert sum(frame.lost for frame in items(tmp_path) if isinstance(frame, Frame)) == int(lost)
    assert ended(open_log(tmp_path)).line.startswith("frames lost: ")
    assert not (tmp_path / codec.GAP_NAME).exists()


def test_a_full_disk_and_then_a_kill_leave_a_log_that_is_incomplete(tmp_path, capsys):
    assert fill(tmp_path / "killed", "killed").returncode == -9
    found = ended(open_log(tmp_path / "killed"))
    assert found.line.startswith("incomplete: the disk was full or failed at the end") and not found.is_sound
    assert replay(["info", str(tmp_path / "killed")]) == 1 and "incomplete: " in capsys.readouterr().out
    assert fill(tmp_path / "again", "room again").returncode == 0
    assert ended(open_log(tmp_path / "again")).line.startswith("frames lost: ")
    assert not (tmp_path / "again" / codec.GAP_NAME).exists()


def test_a_log_that_is_required_ends_the_engine_with_its_first_lost_frame(tmp_path, monkeypatch):
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(required=True))
    full_at(monkeypatch, 2500)
    with pytest.raises(LogLost, match=r"cannot be written \(.*\), and --log-required is on: make room for it, or"):
        record(recorder, arrivals=40)
    assert recorder.frames_lost == 1
    record(recorder)
    recorder.close()
    assert ended(open_log(tmp_path)).kind == "killed" and verify(open_log(tmp_path)).same
    assert not any(frame.lost for frame in items(tmp_path) if isinstance(frame, Frame))


def test_what_cannot_be_cut_off_is_never_written_behind(tmp_path, monkeypatch):
    recorder = Recorder.open(tmp_path, started(CONFIG), "full")
    FailingDisk(monkeypatch, range(2, 3), half=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError("read-only")))
        record(recorder, arrivals=3)
    lost, end = recorder.frames_lost, items(tmp_path)[-1]
    assert lost > 3 and isinstance(end, LogEnd) and end.kind == "torn"
    before = start(started(CONFIG))
    recorder.append([StepPlanned(step=0)], [before], digest(before))
    assert items(tmp_path)[-1].kind == "complete" and items(tmp_path)[-2].lost == lost


@pytest.mark.parametrize("waits", [{}, {"durable": True}, {"required": True}])
def test_a_slow_disk_costs_frames_and_not_the_engine_s_time(tmp_path, monkeypatch, waits):
    """Steps of 100 ms on a disk that takes 50 ms for each write, and gets well again; durable and required logs wait all the
    same."""
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(**waits))
    now, slow, waited, write = [1.0], True, [0.0], os.write

    def slowly(fd, data):
        now[0] += 0.05 * slow
        waited[0] += 0.05 * slow
        return write(fd, data)

    monkeypatch.setattr(segments.time, "monotonic_ns", lambda: round(now[0] * 1e9))
    monkeypatch.setattr(os, "write", slowly)
    for count, (events, befores, after, ranks) in enumerate(engine(CONFIG, 1, 200)):
        if count == 300:
            slow, lost, waited_s, took_s = False, recorder.frames_lost, waited[0], now[0]
        now[0] += 0.1
        recorder.append(events, befores, digest(after), ranks)
    if waits:
        assert lost == recorder.frames_lost == 0 and waited_s == pytest.approx(300 * 0.05)
        return
    assert 1.0 < waited_s < 0.1 * took_s + 1.1 and 100 < lost < 300, "a tenth of the time, and the first second"
    assert recorder.frames_lost < lost + 60 and recorder.failure == "the disk is too slow for the log"
    frames = [item for item in items(tmp_path) if isinstance(item, Frame)]
    assert items(tmp_path)[-1].kind == "complete" and sum(frame.lost for frame in frames) == recorder.frames_lost
    assert frames[-1].first_event + len(frames[-1].events) == after.sequence


def test_after_a_gap_the_log_goes_on_in_a_segment_of_its_own(tmp_path, monkeypatch):
    """The frame that tells of the gap ends a segment that is not too young; the next one begins with a snapshot and folds."""
    monkeypatch.setattr(segments, "RENEW_S", 0.0)
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(timestamped=True))
    FailingDisk(monkeypatch, range(20, 23), half=True)
    record(recorder, arrivals=40)
    recorder.close()
    frames = [list(read([path.read_bytes()])) for path in sorted(tmp_path.glob("*.vnextlog"))]
    assert len(frames) == 2 and frames[0][-2].lost == 3 and frames[1][0].header.snapshot
    whole, after = verify(open_log(tmp_path)), verify(open_log(sorted(tmp_path.glob("*.vnextlog"))[1]))
    assert whole.difference.field == "gap" and after.same and after.steps > 20


# ---- durable -----------------------------------------------------------------------------------------------------


def test_a_durable_log_is_on_the_device_before_append_returns(tmp_path, monkeypatch):
    """Each frame and each header is synced after it was written, a new segment's name too; a sync that fails costs a frame."""
    reported, sync_data, sync = [], os.fdatasync, os.fsync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (reported.append(("data", os.fstat(fd).st_size)), sync_data(fd)))
    monkeypatch.setattr(os, "fsync", lambda fd: (reported.append(("folder", stat.S_ISDIR(os.fstat(fd).st_mode))), sync(fd)))
    recorder = Recorder.open(tmp_path, started(CONFIG), "shape", Bounds(segment_bytes=3000, durable=True))
    for count, (events, befores, after, ranks) in enumerate(engine(CONFIG, 2, 60)):  # noqa: B007  told below
        recorder.append(events, befores, digest(after), ranks)
        newest = max(tmp_path.glob("*.vnextlog"))
        assert reported[-1] == ("data", newest.stat().st_size)
    headers = len(list(tmp_path.glob("*.vnextlog")))
    assert headers > 1 and reported.count(("folder", True)) == headers and len(reported) == count + 1 + 2 * headers

    def failing(fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    size = newest.stat().st_size
    recorder.append([StepPlanned(step=after.planned)], [after], digest(after))
    assert recorder.frames_lost == 1 and newest.stat().st_size == size, "what may not be there is cut off again"


def test_other_logs_wait_for_no_device(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", None)
    monkeypatch.setattr(os, "fsync", None)
    record(Recorder.open(tmp_path, started(CONFIG), "shape", Bounds(segment_bytes=3000, timestamped=True)))
    assert items(tmp_path)[-1].kind == "complete"


# ---- the ring ----------------------------------------------------------------------------------------------------


def size_of(log_dir: Path) -> int:
    return sum(path.stat().st_size for path in log_dir.iterdir())


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_bounded_log_keeps_its_bound_and_its_newest_events(tmp_path, privacy):
    bounds = Bounds(segment_bytes=2000, max_bytes=40_000)
    recorder, sizes = Recorder.open(tmp_path, started(CONFIG), privacy, bounds), []
    for events, befores, after, ranks in engine(CONFIG, 1, 400):
        recorder.append(events, befores, digest(after), ranks)
        sizes.append(size_of(tmp_path))
    begin, *_, end = items(tmp_path)
    assert max(sizes) <= 40_000 and sizes[-1] > 20_000 and recorder.bytes_written > 60_000
    assert begin.header.index > 2 and begin.header.snapshot and end.kind == "complete"
    assert recorder.bytes_written - recorder.bytes_deleted == sizes[-1]


def test_a_small_bound_makes_small_segments():
    assert Bounds().segment_bytes_max == Bounds(max_bytes=2**40).segment_bytes_max == 64 * 2**20
    assert Bounds(max_bytes=2**20).segment_bytes_max == 2**18


def test_old_segments_go_by_age(tmp_path, monkeypatch):
    """A segment ends after a quarter of the age, so that what is too old is not kept by what is new beside it."""
    clock = [1000.0]
    monkeypatch.setattr(segments.time, "monotonic", lambda: clock[0])
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(max_age_s=100.0))
    for events, befores, after, ranks in engine(CONFIG, 1, 60):
        recorder.append(events, befores, digest(after), ranks)
        clock[0] += 5.0
    count = len(list(tmp_path.iterdir()))
    assert 4 <= count <= 6 and items(tmp_path)[0].header.index > 3 and items(tmp_path)[-1].kind == "complete"
    clock[0] += 1000.0
    assert len(list(tmp_path.iterdir())) == count, "an engine that does nothing deletes nothing"


def test_a_segment_that_cannot_start_is_started_later(tmp_path, monkeypatch):
    """The log goes on in the segment it has; the next try comes some frames later."""
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", Bounds(segment_bytes=2000))
    opened, tries = os.open, []

    def failing(path, *arguments):
        tries.append(path)
        if len(tries) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *arguments)

    monkeypatch.setattr(segments.os, "open", failing)
    events = record(recorder, arrivals=120)
    frames = [item for item in items(tmp_path) if isinstance(item, Frame)]
    assert recorder.failure.endswith("Too many open files") and recorder.frames_lost == 0 and len(tries) > 4
    assert [event for frame in frames for event in frame.events] == events and items(tmp_path)[-1].kind == "complete"


def test_a_segment_that_cannot_be_deleted_is_tried_again(tmp_path, monkeypatch):
    bounds = Bounds(segment_bytes=2000, max_bytes=30_000)
    recorder = Recorder.open(tmp_path, started(CONFIG), "full", bounds)

    def busy(path, missing_ok=False):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", busy)
        iterations = engine(CONFIG, 1, 400)
        for _ in range(400):
            events, befores, after, ranks = next(iterations)
            recorder.append(events, befores, digest(after), ranks)
    assert size_of(tmp_path) > 30_000 and recorder.frames_lost == 0 and "busy" in recorder.failure
    for events, befores, after, ranks in iterations:
        recorder.append(events, befores, digest(after), ranks)
    assert size_of(tmp_path) <= 30_000
