"""Frames without a stamp in the middle of a log: their times are unknown in every command, and all other times stay what they
are in the whole log."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from log_drive import drawn_config, record

from scripts.make_log import make_log
from vnext.log.reading import read
from vnext.log.timestamps import TimestampEncoder
from vnext.replay.answers.timeline import Timeline
from vnext.replay.answers.trace import trace
from vnext.replay.cli.main import main
from vnext.replay.futures.recording import recorded
from vnext.replay.reading.client_latency import ClientLatency
from vnext.replay.reading.index import Index
from vnext.replay.reading.joining import joined
from vnext.replay.reading.source import open_log
from vnext.replay.reading.step_counts import added
from vnext.replay.reading.times import timestamps_of, timestamps_of_segment, timestamps_path


def restamped(log_dir: Path, keeps: Callable[[int, int, int], bool]) -> None:
    """Give the frames whose segment, place in it and the segment's frames `keeps` takes times that are far apart, all
    others none."""
    rng, now_us = random.Random(7), 0
    for number, path in enumerate(open_log(log_dir).paths):
        ends, timestamp_encoder = timestamps_of_segment(path).events.tolist(), TimestampEncoder(10**18)
        for place, end in enumerate(ends):
            now_us += rng.randrange(1000, 100_000)
            if keeps(number, place, len(ends)):
                timestamp_encoder.add(end, now_us)
        timestamp_encoder.end_block()
        timestamps_path(path).write_bytes(bytes(timestamp_encoder.data))


def times_of(log_dir: Path) -> dict[str, Counter]:
    """How often each time is in what `slow` and `stat` count, and each line in what `trace` draws."""
    index, drawn = Index(open_log(log_dir)), io.StringIO()
    directories = [segment.directory for segment in index.segments]
    latency = joined([msgspec.msgpack.decode(each.latency, type=ClientLatency) for each in directories])
    trace(open_log(log_dir), drawn, "")
    return {
        "firsts": Counter(latency.firsts.counts()),
        "gaps": Counter(latency.gaps.counts()),
        "steps": Counter(latency.steps.counts()),
        "stat": Counter(added([each.step_counts for each in directories]).step_us),
        "trace": Counter(line.rstrip(",") for line in drawn.getvalue().splitlines()),
    }


def require_known_or_unknown(whole: Path, holed: Path) -> None:
    due, found = times_of(whole), times_of(holed)
    for kind, counts in found.items():
        assert counts <= due[kind], (kind, (counts - due[kind]).most_common(3))
        assert 0 < counts.total() < due[kind].total(), kind


def middle(number: int, place: int, count: int) -> bool:
    """All but the second half of the second segment."""
    return number != 1 or place < count // 2


def scattered(number: int, place: int, count: int) -> bool:
    """Holes of a few frames each; the first frame is the clock's zero, and the last one the end of what is drawn."""
    return place % 23 < 17 or place + 1 == count


def single(number: int, place: int, count: int) -> bool:
    """Every third frame alone, the first of a segment among them: steps that were under way then began at an unknown time."""
    return place % 3 != 0 or (number, place) == (0, 0) or place + 1 == count


@pytest.mark.parametrize("keeps", [middle, scattered, single])
@pytest.mark.parametrize("seed", range(4))
def test_known_times_stay_and_others_are_unknown(tmp_path, seed, keeps):
    """Whatever the engine does, of several segments."""
    whole = record(
        tmp_path / "whole", "full", drawn_config(random.Random(seed)), seed, arrivals=120, size=4000, timestamped=True
    )
    holed = shutil.copytree(whole, tmp_path / "holed")
    assert len(open_log(whole).paths) >= 3
    restamped(whole, lambda number, place, count: True)
    restamped(holed, keeps)
    require_known_or_unknown(whole, holed)


@pytest.mark.parametrize("batch", [2, 12])
def test_a_busy_log_is_drawn_in_runs_as_event_by_event(tmp_path, monkeypatch, batch):
    make_log(tmp_path / "whole", 1200, batch)
    holed = shutil.copytree(tmp_path / "whole", tmp_path / "holed")
    restamped(tmp_path / "whole", lambda number, place, count: True)
    restamped(holed, lambda number, place, count: scattered(number, place // 20, count // 20) or place + 1 == count)
    require_known_or_unknown(tmp_path / "whole", holed)
    by_event, in_runs, runs, meet = io.StringIO(), io.StringIO(), [], Timeline.meet_run
    monkeypatch.setattr(Timeline, "meet_run", lambda self, run: (runs.append(run.frames), meet(self, run))[1])
    due = trace(open_log(holed), in_runs, "")
    assert runs
    monkeypatch.setattr("vnext.replay.answers.trace.read", lambda segments, steady: read(segments))
    assert trace(open_log(holed), by_event, "") == due
    assert in_runs.getvalue() == by_event.getvalue()


def test_every_command_says_so(tmp_path, capsys):
    """null in a trace of requests, a count of what is not drawn, what-if learns from what lies before."""
    whole = record(tmp_path / "whole", arrivals=120, size=4000, timestamped=True)
    holed = shutil.copytree(whole, tmp_path / "holed")
    restamped(whole, lambda number, place, count: True)
    restamped(holed, middle)
    lines = {}
    for log_dir in (whole, holed):
        assert main(["convert", str(log_dir), "--to", "vllm-vcr", "-o", str(tmp_path / f"{log_dir.name}.vcr")]) == 0
        lines[log_dir] = [json.loads(line) for line in (tmp_path / f"{log_dir.name}.vcr").read_text().splitlines()[1:]]
    unknown = 0
    for due, found in zip(lines[whole], lines[holed], strict=True):
        pairs = [(due["ttft_ms"], found["ttft_ms"]), *zip(due.get("itl_ms") or (), found.get("itl_ms") or (), strict=True)]
        assert all(known in (each, None) for each, known in pairs)
        unknown += sum(known is None for _, known in pairs)
    assert 0 < unknown < sum(len(each.get("itl_ms") or ()) for each in lines[whole])
    capsys.readouterr()
    assert main(["trace", str(whole), "-o", str(tmp_path / "trace")]) == 0 and "hole" not in capsys.readouterr().out
    assert main(["trace", str(holed), "-o", str(tmp_path / "trace")]) == 0
    assert "the log's times have a hole: " in capsys.readouterr().out
    due, taken, known = recorded(open_log(whole)), recorded(open_log(holed)), timestamps_of(open_log(holed)).events.tolist()
    assert taken.times_us == due.times_us[: len(taken.times_us)] and len(taken.times_us) < known[-1] - 1
