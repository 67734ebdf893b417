"""The index: any step's state as folding from the start gives it, from caches that are believed only as far as they fit."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

import msgspec
import pytest
from log_drive import drawn_config, record, small_config

from vnext.replay.answers.request_life import life
from vnext.replay.cli.main import main
from vnext.replay.reading import cachefile, making
from vnext.replay.reading.cachefile import cache_path
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import show, state_at
from vnext.replay.reading.source import open_log
from vnext.state.digest import parts
from vnext.state.events import StepPlanned


@pytest.fixture(autouse=True)
def close_snapshots(monkeypatch):
    """A snapshot each few steps."""
    monkeypatch.setattr(making, "COST_BETWEEN", 150)


def states(log_dir: Path) -> dict[int, bytes]:
    """What each step's state is by plain folding."""
    return {
        item.event.step: repr(parts(item.after)).encode()
        for item in fold(open_log(log_dir))
        if isinstance(item, Folded) and isinstance(item.event, StepPlanned)
    }


def shown(log_dir: Path, step: int | None) -> bytes:
    return repr(parts(state_at(Index(open_log(log_dir)), step)[0])).encode()


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize("seed", range(4))
def test_any_step_at_once_is_the_step_by_folding(tmp_path, privacy, seed):
    log_dir = record(tmp_path / "log", privacy, drawn_config(random.Random(seed)), seed, arrivals=60, size=4000)
    due = states(log_dir)
    index = Index(open_log(log_dir))
    for step in random.Random(seed).sample(sorted(due), min(40, len(due))):
        assert repr(parts(state_at(index, step)[0])).encode() == due[step]
    assert {segment.source for segment in index.segments} <= {"built", ""}
    assert all(segment.first.pool.status._next is None for segment in index.segments), "what came later is not kept with it"
    again = Index(open_log(log_dir))
    for step in sorted(due)[::7]:
        assert repr(parts(state_at(again, step)[0])).encode() == due[step]
    assert {segment.source for segment in again.segments} <= {"cache", "built", ""} and again.segments[0].source == "cache"
    assert len(again.segments[0].directory.entries) > 4


def test_only_the_segment_that_holds_the_step_is_indexed(tmp_path):
    log_dir = record(tmp_path / "log", arrivals=150, size=2000)
    steps = sorted(states(log_dir))
    shown(log_dir, steps[-1])
    assert [path.suffix for path in sorted(log_dir.iterdir())].count(cachefile.CACHE_SUFFIX) == 1
    assert cache_path(sorted(log_dir.glob("*.vnextlog"))[-1]).exists()


def test_a_damaged_cache_is_made_anew(tmp_path):
    """Every byte of it, one after the other."""
    log_dir = record(tmp_path / "log", arrivals=12)
    due, step = states(log_dir), 20
    shown(log_dir, step)
    path = cache_path(next(log_dir.glob("*.vnextlog")))
    good = path.read_bytes()
    for at in range(0, len(good), 61):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        assert shown(log_dir, step) == due[step]
    for size in range(0, len(good), 211):
        path.write_bytes(good[:size])
        assert shown(log_dir, step) == due[step]


def test_a_cache_of_another_log_is_not_believed(tmp_path):
    """Its snapshots are whole and its checksums right, but they are states of another run."""
    one, other = (record(tmp_path / name, seed=seed, arrivals=30) for name, seed in (("one", 1), ("other", 2)))
    due, step = states(one), 25
    shown(one, step), shown(other, step)
    paths = [cache_path(next(each.glob("*.vnextlog"))) for each in (one, other)]
    shutil.copy(paths[1], paths[0])
    assert shown(one, step) == due[step]
    mine, strange = (cachefile.read(path) for path in paths)
    data = [cachefile.read_snapshot(paths[1], entry) for entry in strange.entries[1 : len(mine.entries)]]
    forged = cachefile.placed(list(mine.entries[: len(data) + 1]), data)
    cachefile.write(paths[0], msgspec.structs.replace(mine, entries=forged), data)
    assert cachefile.read(paths[0]) is not None and shown(one, step) == due[step]


def test_a_log_that_has_grown_is_indexed_from_where_it_was(tmp_path):
    log_dir = record(tmp_path / "log", arrivals=40)
    path = next(log_dir.iterdir())
    whole, due = path.read_bytes(), states(log_dir)
    path.write_bytes(whole[: len(whole) // 2])
    index = Index(open_log(log_dir))
    early = index.last.planned
    assert index.segments[0].source == "built" and 10 < early < max(due)
    path.write_bytes(whole)
    index = Index(open_log(log_dir))
    assert index.last.planned == max(due) + 1 and index.segments[0].source == "extended"
    for step in (3, early - 1, early, max(due)):
        assert repr(parts(state_at(index, step)[0])).encode() == due[step]


def test_another_log_in_the_same_place_is_seen(tmp_path):
    log_dir = record(tmp_path / "log", arrivals=40)
    shown(log_dir, 9)
    path = next(log_dir.glob("*.vnextlog"))
    data = record(tmp_path / "two", seed=2, arrivals=40) / path.name
    path.write_bytes(data.read_bytes())
    assert shown(log_dir, 9) == states(tmp_path / "two")[9]


def test_a_folder_that_cannot_be_written_serves_without_a_cache(tmp_path, monkeypatch):
    log_dir = record(tmp_path / "log", arrivals=40)
    due = states(log_dir)
    if os.geteuid():
        log_dir.chmod(stat.S_IRUSR | stat.S_IXUSR)
    else:  # root writes everywhere: the folder refuses by hand
        def refuse(*arguments, **names):
            raise PermissionError("Read-only file system")

        monkeypatch.setattr(cachefile.tempfile, "mkstemp", refuse)
    index = Index(open_log(log_dir))
    assert all(repr(parts(state_at(index, step)[0])).encode() == due[step] for step in (2, 30, max(due)))
    assert [path.suffix for path in log_dir.iterdir()] == [".vnextlog"]


def test_a_cache_is_bounded(tmp_path, monkeypatch):
    """Every second place goes when they take too much; what is left still leads everywhere."""
    log_dir = record(tmp_path / "log", arrivals=200)
    due = states(log_dir)
    monkeypatch.setattr(cachefile, "bytes_max", lambda size: 20_000)
    index = Index(open_log(log_dir))
    assert index.last
    notes = len(index.segments[0].directory.latency)  # which have a bound of their own
    assert cache_path(log_dir / "segment-000000.vnextlog").stat().st_size - notes < 30_000
    assert 2 < len(index.segments[0].directory.entries) < len(due) // 4
    assert all(repr(parts(state_at(index, step)[0])).encode() == due[step] for step in sorted(due)[::20])


def test_a_request_is_told_of_from_anywhere(tmp_path):
    """With an index of many places as with none at all, across segments."""
    log_dir = record(tmp_path / "log", "shape", small_config(page_count=18), arrivals=60, size=3000)
    index = Index(open_log(log_dir))
    found = [life(index, request_id) for request_id in range(60)]
    for path in log_dir.glob(f"*{cachefile.CACHE_SUFFIX}"):
        path.unlink()
    making.COST_BETWEEN = 10**9
    plain = Index(open_log(log_dir))
    assert [life(plain, request_id) for request_id in range(60)] == found
    assert [each.id for each in found] == list(range(60)) and all(each.finish for each in found)


def test_the_end_of_a_torn_or_damaged_log_is_shown(tmp_path, capsys):
    log_dir = record(tmp_path / "log", arrivals=40)
    path = next(log_dir.iterdir())
    data, due = path.read_bytes(), states(log_dir)
    for bad in (data[:-5], data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :]):
        path.write_bytes(bad)
        last = show(Index(open_log(log_dir)), None)
        assert repr(parts(state_at(Index(open_log(log_dir)), last.step)[0])).encode() == due[last.step]
        assert main(["show", str(log_dir), str(max(due) + 1)]) == 2
        assert "it has steps 0 to" in capsys.readouterr().err


def test_a_cache_goes_with_its_segment(tmp_path):
    log_dir = record(tmp_path / "log", arrivals=150, size=2000)
    for segment in Index(open_log(log_dir)).segments:
        assert segment.directory.entries
    paths = sorted(log_dir.glob("*.vnextlog"))
    assert all(cache_path(path).exists() for path in paths)
    for path in paths[:2]:
        path.unlink()
    Index(open_log(log_dir))
    assert [cache_path(path).exists() for path in paths] == [False, False, *[True] * (len(paths) - 2)]
