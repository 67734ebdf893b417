"""The log tool's index, made while an engine serves: there when it is asked for, never believed too far, in nobody's way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine_here import engines_here
from log_drive import drawn_config, engine, record, small_config, started

from vnext import LLM, SamplingParams
from vnext.replay.answers.slow import slow
from vnext.replay.answers.stat import stat
from vnext.replay.reading import cachefile, keep_index
from vnext.replay.reading.cachefile import cache_path
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.runtime.record import compressor
from vnext.runtime.record.compressor import Indexer
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.digest import digest

INDEX_TIMEOUT_S = 200.0
SLEEPER = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def short_segments_too(monkeypatch) -> None:
    monkeypatch.setattr(compressor, "BYTES_MIN", 3_000)


def recorded(log_dir: Path, bounds: Bounds, arrivals: int = 40) -> Recorder:
    """A log that is not closed yet. All that its indexer was given is done."""
    config = small_config()
    recorder = Recorder.open(log_dir, started(config), "full", bounds)
    for events, befores, after, ranks in engine(config, 1, arrivals):
        recorder.append(events, befores, digest(after), ranks)
        indexer = recorder._files._indexer
        if indexer is not None:
            indexer._wanted.join()
    return recorder


def sources(log_dir: Path) -> list[str]:
    index = Index(open_log(log_dir))
    assert all(segment.directory.entries for segment in index.segments)
    return [segment.source for segment in index.segments]


def test_an_index_is_made_whatever_lies_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "maker_of_nothing.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    indexer = Indexer("maker_of_nothing")
    indexer.add(tmp_path / "segment")
    indexer.finish()
    assert not (tmp_path / "ran").exists()


def test_an_engine_s_own_log_has_its_index(tmp_path):
    """As the engine core is started: the option reaches the recorder."""
    with engines_here(), LLM(executor="inproc", log="full", log_dir=str(tmp_path)) as llm:
        for _ in range(10):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
        (log_dir,) = tmp_path.iterdir()
        (segment,) = log_dir.glob("*.vnextlog")
        assert segment.stat().st_size > 2 * compressor.BYTES_MIN
        gives_up = time.monotonic() + INDEX_TIMEOUT_S
        while not cache_path(segment).exists() and time.monotonic() < gives_up:
            time.sleep(0.05)  # the lowest priority: it runs when nobody else does
        assert cache_path(segment).exists()


def test_the_index_is_there_while_the_engine_serves(tmp_path):
    """The newest segment's goes on from where it was made last, a closed one's is whole."""
    recorder = recorded(tmp_path / "log", Bounds(segment_bytes=9_000, timestamped=True, indexed=True), arrivals=70)
    *closed, newest = sources(tmp_path / "log")
    assert len(closed) >= 2 and set(closed) == {"cache"} and newest in ("extended", "cache", "built")
    recorder.close()
    plain = recorded(tmp_path / "plain", Bounds(segment_bytes=9_000, timestamped=True), arrivals=70)
    plain.close()
    assert not list((tmp_path / "plain").glob("*.vnextcache"))
    found, due = (stat(Index(open_log(tmp_path / name))) for name in ("log", "plain"))
    reported = ("steps", "tokens", "batch", "queue", "running", "free_blocks", "sampled_tokens", "finished", "stopped")
    assert [getattr(found, name) for name in reported] == [getattr(due, name) for name in reported]


def test_the_newest_segment_is_indexed_as_it_grows(tmp_path):
    recorder = recorded(tmp_path / "log", Bounds(timestamped=True, indexed=True))
    path = next((tmp_path / "log").glob("*.vnextlog"))
    reported = cachefile.read(cache_path(path))
    size = path.stat().st_size
    assert reported is not None and reported.size >= size - max(3_000, size // compressor.GROWTH_SHARE) - 3_000
    assert sources(tmp_path / "log")[0] in ("extended", "cache")
    recorder.close()


def test_an_index_goes_with_its_segment_and_counts(tmp_path):
    bounds = Bounds(segment_bytes=8_000, max_bytes=60_000, timestamped=True, indexed=True)
    recorder = recorded(tmp_path / "log", bounds, arrivals=120)
    recorder.close()
    kept = {path.stem for path in (tmp_path / "log").glob("*.vnextlog")}
    indexed = {path.stem for path in (tmp_path / "log").glob("*.vnextcache")}
    assert "segment-000000" not in kept and indexed <= kept and len(indexed) >= 1
    room = sum(path.stat().st_size for path in (tmp_path / "log").glob("*.vnext[lc]*"))
    assert room <= bounds.max_bytes


def test_the_ring_deletes_an_index_with_its_segment(tmp_path):
    """Also one that somebody else has made, where no other is made that would clear it away."""
    recorder = recorded(tmp_path / "log", Bounds(segment_bytes=4_000, max_bytes=20_000), arrivals=20)
    index = cache_path(tmp_path / "log" / "segment-000000.vnextlog")
    index.write_bytes(b"of the first")
    for events, befores, after, ranks in engine(small_config(), 1, 120):
        recorder.append(events, befores, digest(after), ranks)
    recorder.close()
    assert not index.with_suffix(".vnextlog").exists() and not index.exists()


def test_a_process_that_serves_no_engine_any_more_ends(tmp_path):
    path = next(record(tmp_path / "log").glob("*.vnextlog"))
    with pytest.raises(SystemExit):
        keep_index.keep(path, engine=-1)
    assert sorted(each.suffix for each in path.parent.iterdir()) == [".vnextlog"]


def test_a_disk_that_is_nearly_full_gets_no_index(tmp_path, monkeypatch):
    path = next(record(tmp_path / "log").glob("*.vnextlog"))
    monkeypatch.setattr(keep_index, "FREE_MIN", 2**60)
    assert not keep_index.keep(path, os.getppid()) and not cache_path(path).exists()
    monkeypatch.setattr(keep_index, "FREE_MIN", 0)
    assert keep_index.keep(path, os.getppid()) and cache_path(path).exists()


@pytest.mark.parametrize("error, is_raised", [(OSError("full"), False), (SystemExit(1), True), (KeyboardInterrupt(), True)])
def test_an_index_that_was_not_finished_leaves_nothing(tmp_path, monkeypatch, error, is_raised):
    """The disk is full, or the process is to end while it writes."""

    def fail(*given: object) -> None:
        raise error

    path = next(record(tmp_path / "log").glob("*.vnextlog"))
    monkeypatch.setattr(cachefile.os, "replace", fail)
    if is_raised:
        with pytest.raises(type(error)):
            keep_index.keep(path, os.getppid())
    else:
        assert not keep_index.keep(path, os.getppid())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_a_killed_process_left_is_cleared_away_later(tmp_path):
    path = next(record(tmp_path / "log").glob("*.vnextlog"))
    old, young = (path.with_name(f"{cache_path(path).name}{name}") for name in ("old", "young"))
    for each in (old, young):
        each.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    Index(open_log(tmp_path / "log"))
    assert young.exists() and not old.exists()


def test_a_segment_that_the_ring_deletes_meanwhile_leaves_no_index(tmp_path, monkeypatch):
    path = next(record(tmp_path / "log").glob("*.vnextlog"))
    write = cachefile.write
    monkeypatch.setattr(cachefile, "write", lambda *given: (path.unlink(), write(*given))[1])
    assert not keep_index.keep(path, os.getppid()) and not list(path.parent.iterdir())
    assert not keep_index.keep(path, os.getppid())


def test_the_process_has_the_lowest_priority(tmp_path):
    code = "import os, sys; from vnext.replay.reading import keep_index as k; k._give_way()\n"
    code += "print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE, any(name.startswith('numpy') for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["19", "True", "False"]


def test_an_engine_that_ends_waits_for_no_index(tmp_path, monkeypatch):
    """The process that makes one is ended with it."""
    indexer = Indexer()
    indexer._command = [sys.executable, "-c", SLEEPER]
    indexer.add(tmp_path / "segment-000000.vnextlog")
    indexer.add(tmp_path / "segment-000001.vnextlog")
    while indexer._process is None:
        time.sleep(0.01)
    process = indexer._process
    indexer.close()
    assert process.poll() is not None and not indexer._thread.is_alive()


def test_no_process_can_be_started_and_the_log_goes_on(tmp_path, monkeypatch):
    def fail(*given: object, **named: object) -> None:
        raise BlockingIOError("no process more")

    monkeypatch.setattr(compressor.subprocess, "Popen", fail)
    recorder = recorded(tmp_path / "log", Bounds(segment_bytes=9_000, timestamped=True, indexed=True))
    recorder.close()
    assert recorder.frames_lost == 0 and set(sources(tmp_path / "log")) == {"built"}


@pytest.mark.parametrize("seed", range(3))
def test_an_index_made_beside_a_growing_log_says_what_one_made_at_the_end_says(tmp_path, seed):
    """Frames and stamps come while it is made: it has as many of them as it found, or is made anew."""
    config = drawn_config(random.Random(seed))
    recorder = Recorder.open(tmp_path / "log", started(config), "full", Bounds(timestamped=True))
    path, done = tmp_path / "log" / "segment-000000.vnextlog", threading.Event()

    def keep() -> None:
        while not done.is_set():
            keep_index.keep(path, os.getppid())

    keeper = threading.Thread(target=keep)
    keeper.start()
    for events, befores, after, ranks in engine(config, seed, 40):
        recorder.append(events, befores, digest(after), ranks)
        time.sleep(0.001)
    recorder.close()
    done.set()
    keeper.join()
    found = slow(Index(open_log(tmp_path / "log")), 50)
    cache_path(path).unlink()
    assert found == slow(Index(open_log(tmp_path / "log")), 50)
