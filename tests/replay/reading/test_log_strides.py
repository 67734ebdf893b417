"""Folding a log in strides, and the notes of its index: the same states, counts and waits as event by event, however they came."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest
from log_drive import drawn_config, record, small_config

from scripts.make_log import make_log
from vnext.log import log_bytes, skimming
from vnext.log.reading import read, read_frames
from vnext.log.snapshot import snapshot
from vnext.log.timestamps import BLOCK_MAGIC
from vnext.replay.answers.slow import slow
from vnext.replay.reading import making
from vnext.replay.reading.cachefile import Directory, cache_path
from vnext.replay.reading.client_latency import ClientLatency
from vnext.replay.reading.folding import FrameFolded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log, part_of
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import timestamps_path

MANY = 1_000


def notes(found: Directory) -> tuple:
    """All that an index says of a segment but for the file's times."""
    latency = msgspec.msgpack.decode(found.latency, type=ClientLatency)
    return found.step_counts, latency, found.end, found.stopped, found.entries[-1].sequence, found.entries[-1].chain


def in_strides(log_dir: Path) -> list[tuple[int, object, bool]]:
    """(sequence, state, whether a run led there) behind each item of a log's one segment."""
    log = open_log(log_dir)
    first = Index(log).segments[0]
    data, begin = memoryview(part_of(log.paths[0])), first._begin()
    folding, found = Folding(first.first), []
    for offset, item in folding.through(read_frames(data[begin.offset :], begin.sequence, steady=True)):
        found.append((folding.state.sequence, snapshot(folding.state), isinstance(item, Run), begin.offset + offset))
    assert found[-1][3] == len(data)
    return found


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize("seed", range(4))
def test_strides_of_a_log_lead_to_its_states(tmp_path, seed, privacy):
    config = drawn_config(random.Random(seed)) if seed else small_config(page_count=60)
    log_dir = record(tmp_path / "log", privacy, config, seed, arrivals=60)
    due = {item.state.sequence: snapshot(item.state) for item in fold(open_log(log_dir)) if isinstance(item, FrameFolded)}
    found = in_strides(log_dir)
    assert all(state == due[sequence] for sequence, state, *_ in found)


def test_most_frames_of_a_busy_log_are_taken_in_strides(tmp_path):
    make_log(tmp_path / "log", 1500, 4)
    due = {
        item.state.sequence: snapshot(item.state)
        for item in fold(open_log(tmp_path / "log"))
        if isinstance(item, FrameFolded)
    }
    found = in_strides(tmp_path / "log")
    assert all(state == due[sequence] for sequence, state, *_ in found)
    assert len(found) < len(due) / 3 and sum(is_run for *_, is_run, _ in found) > 20


@pytest.mark.parametrize("batch", [4, 12])
def test_notes_are_those_of_folding_event_by_event(tmp_path, monkeypatch, batch):
    make_log(tmp_path / "log", 900, batch)
    in_strides = notes(Index(open_log(tmp_path / "log")).segments[0].directory)
    cache_path(next((tmp_path / "log").glob("*.vnextlog"))).unlink()
    monkeypatch.setattr(making, "read_frames", lambda *given, **named: read_frames(*given))
    assert notes(Index(open_log(tmp_path / "log")).segments[0].directory) == in_strides
    latency = in_strides[1]
    assert (
        latency.clock == "stamps"
        and len(latency.gaps) > 500
        and sum(latency.step_us.values()) == 898
        and not latency.opened
    )


def test_an_index_that_grew_with_its_log_is_the_one_that_is_made_at_the_end(tmp_path, monkeypatch):
    """Frames come before their stamps, a look falls anywhere, and times that come later are counted as if they had been there."""
    monkeypatch.setattr(making, "COST_BETWEEN", 3_000)
    make_log(tmp_path / "whole", 700, 4)
    path = next((tmp_path / "whole").glob("*.vnextlog"))
    log, timestamps = path.read_bytes(), timestamps_path(path).read_bytes()
    due = notes(Index(open_log(tmp_path / "whole")).segments[0].directory)
    live = tmp_path / "live" / path.name
    live.parent.mkdir()
    rng, size, reported, sources = random.Random(5), 900, 0, set()
    while size < len(log) or reported < len(timestamps):
        size = min(len(log), size + rng.choice((0, 7, 900, 9_000)))
        behind = max(reported, len(timestamps) * size // len(log) - 50) if size < len(log) else len(timestamps)
        reported = min(reported + rng.choice((0, 0, 100, 5_000)), behind)
        live.write_bytes(log[:size])
        timestamps_path(live).write_bytes(timestamps[:reported])
        segment = Index(open_log(live.parent)).segments[0]
        assert segment.directory.entries
        sources.add(segment.source)
    assert notes(segment.directory) == due and "extended" in sources
    again = Index(open_log(live.parent)).segments[0]
    assert notes(again.directory) == due and again.source == "cache"


def test_a_cache_whose_stamps_have_changed_is_not_believed(tmp_path):
    make_log(tmp_path / "log", 300, 4)
    path = next((tmp_path / "log").glob("*.vnextlog"))
    timestamps = timestamps_path(path).read_bytes()
    whole = slow(Index(open_log(tmp_path / "log")), 9)
    timestamps_path(path).unlink()
    assert slow(Index(open_log(tmp_path / "log")), 9).clock == "steps"
    timestamps_path(path).write_bytes(timestamps)
    assert slow(Index(open_log(tmp_path / "log")), 9) == whole


def test_segments_are_joined_as_if_they_were_one(tmp_path):
    config = small_config(page_count=15)
    one, many = (
        record(tmp_path / name, config=config, seed=3, arrivals=120, **size)
        for name, size in (("one", {}), ("many", {"size": 1500}))
    )
    assert len(list(many.glob("*.vnextlog"))) > 4
    whole, parts = (slow(Index(open_log(each)), MANY) for each in (one, many))
    for kind in ("firsts", "steps"):
        assert sorted(map(repr, getattr(parts, kind))) == sorted(map(repr, getattr(whole, kind)))
    assert parts.counts == whole.counts and parts.medians == whole.medians
    gaps = {(each.step, each.id): each for each in parts.gaps}
    for gap in whole.gaps:  # where a step ends waits of requests that are older than its segment, those are told apart
        found = gaps[gap.step, gap.id]
        assert (found.ms, found.last_step, found.preempted, found.tokens) == (gap.ms, gap.last_step, gap.preempted, gap.tokens)


def test_a_log_is_not_folded_twice(tmp_path, monkeypatch):
    make_log(tmp_path / "log", 300, 4)
    whole = slow(Index(open_log(tmp_path / "log")), 5)
    monkeypatch.setattr(making.Making, "made", None)
    assert slow(Index(open_log(tmp_path / "log")), 5) == whole


def test_a_log_without_the_last_stamps_tells_no_times_that_nobody_knows(tmp_path):
    """As an engine that was killed leaves it."""
    make_log(tmp_path / "log", 1_200, 4)
    path = next((tmp_path / "log").glob("*.vnextlog"))
    shutil.copytree(tmp_path / "log", tmp_path / "killed", ignore=shutil.ignore_patterns("*.vnextcache"))
    found = timestamps_path(tmp_path / "killed" / path.name)
    data = found.read_bytes()
    found.write_bytes(data[: data.rindex(BLOCK_MAGIC) + 40])  # a part of a block is none
    whole, killed = (slow(Index(open_log(tmp_path / name)), MANY) for name in ("log", "killed"))
    assert killed.clock == "stamps" and all(each < most for each, most in zip(killed.counts, whole.counts))
    found, least = {(each.step, each.ms) for each in whole.steps}, whole.steps[-1].ms
    assert {(each.step, each.ms) for each in killed.steps if each.ms > least} <= found


def test_both_forms_read_steady_frames_alike(tmp_path):
    make_log(tmp_path / "log", 200, 4)
    log = open_log(tmp_path / "log")
    data = part_of(log.paths[0])
    items = list(read([data], steady=True))
    runs = [item for item in items if hasattr(item, "ends")]
    assert len(runs) > 1 and len(list(read([data]))) == sum(len(item.ends) if item in runs else 1 for item in items)
    skims = [skimming.skim_steady] + ([log_bytes.skim_steady] if log_bytes._log is not None else [])
    for run in runs:
        for at, room in ((0, 999), (1, 999), (0, 3)):
            start = run.offset if not at else int(run.ends[0])
            answers = []
            for skim in skims:
                buffers = [bytearray(4 * 999), bytearray(4 * room), bytearray(8 * room)]
                answers.append((skim(data, start, run.first_event + 2 * at, *buffers), *map(bytes, buffers)))
            assert all(each == answers[0] for each in answers)
            assert answers[0][0][2] == min(room, len(run.ends) - at)
