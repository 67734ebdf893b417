"""stat, diff and ranks: percentiles of what really happened, the first divergence by hand and by seed, drift at its step."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from log_drive import drawn_config, engine, record, small_config, started

from vnext.log import codec
from vnext.log.codec import RankDetail, RankDigest
from vnext.log.reading import read
from vnext.replay.answers.diff import diff
from vnext.replay.answers.ranks import ranks
from vnext.replay.answers.stat import stat
from vnext.replay.cli.main import main
from vnext.replay.reading import index as indexing
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.replay.reading.step_counts import percentiles
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.digest import details, digest
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---- stat --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10**6, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_stat_counts_what_folding_shows(tmp_path, capsys, seed, size):
    log_dir = record(tmp_path / "log", "shape", drawn_config(random.Random(seed)), seed, arrivals=80, size=size)
    tokens, queue, batch, state = [], [], [], None
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded):
            state = item.after
            if isinstance(item.event, StepPlanned):
                tokens.append(state.in_flight[-1].tokens)
                batch.append(len(state.in_flight[-1].ids))
                queue.append(len(state.waiting))
    code, found = answer(capsys, "stat", log_dir)
    assert code == 0 and found["steps"] == len(tokens) and found["computed_tokens"] == sum(tokens)
    for name, values in (("tokens", tokens), ("queue", queue), ("batch", batch)):
        assert found[name] == np.percentile(values, (50, 90, 99, 100), method="lower").astype(int).tolist()
    counters = state.counters
    assert found["hit_tokens"] == counters.prefix_hit_tokens and found["preemptions"] == counters.preempted
    assert found["queried_tokens"] == counters.prefix_queried_tokens and found["stopped"] == ""
    assert answer(capsys, "stat", log_dir)[1] == found, "from the cache"


def test_step_times_are_those_of_the_clock(tmp_path, monkeypatch):
    """Frames that are 5 ms apart while steps run, and an hour in which nobody asks."""
    from vnext.runtime.record import timestamp_file

    now = [0]
    monkeypatch.setattr(timestamp_file.time, "monotonic_ns", lambda: now[0])
    recorder, idle = Recorder.open(tmp_path, started(small_config()), "full", Bounds(timestamped=True)), 0
    for events, befores, after, reports in engine(small_config(), 3, 60):
        now[0] += 5_000_000
        if befores and not befores[0].requests and not befores[0].in_flight:
            now[0] += 3_600_000_000_000
            idle += 1
        recorder.append(events, befores, digest(after), reports)
    recorder.close()
    found = stat(Index(open_log(tmp_path)))
    assert idle > 0 and found.step_us[0] == 5000 and found.seconds < 60


def test_percentiles_of_counts_are_those_of_values() -> None:
    rng = random.Random(1)
    for size in (1, 2, 7, 100, 1000):
        values = [rng.randrange(20) for _ in range(size)]
        due = np.percentile(values, (50, 90, 99, 100), method="lower").astype(int).tolist()
        assert percentiles(dict(Counter(values)), (50, 90, 99, 100)) == due
    assert percentiles({}, (50, 90)) == []


# ---- diff --------------------------------------------------------------------------------------------------------


def rewritten(log_dir: Path, out: Path, change, size: int = 10**6) -> Path:
    """The log written anew, with events changed by `change(number, event)`; digests stay as they were."""
    items = list(open_log(log_dir).items())
    header = items[0].header
    out.mkdir()
    data, chain = codec.open_segment(header)
    for frame in (item for item in items if isinstance(item, codec.Frame)):
        events = [change(number, event) for number, event in enumerate(frame.events, frame.first_event)]
        body = codec.encode_body(frame.first_event, events, frame.rank_digests, 0, header.token_width, frame.details)
        data += codec.encode_frame(frame.digest, body)
    (out / codec.segment_name(0)).write_bytes(data)
    return out


def test_a_log_is_equal_to_its_copy_and_to_the_same_run_in_other_segments(tmp_path, capsys):
    one = record(tmp_path / "one", arrivals=80)
    shutil.copytree(one, tmp_path / "two")
    code, found = answer(capsys, "diff", one, tmp_path / "two")
    assert code == 0 and found["same"] and found["segments_equal"] == 1
    other = record(tmp_path / "other", arrivals=80, size=1500)
    assert len(list(other.iterdir())) > 3
    found = diff(open_log(one), open_log(other))
    assert found.same and found.fields == [] and found.event == -1 and found.segments_equal == 0
    segments = record(tmp_path / "more", arrivals=80, size=1500)
    assert diff(open_log(other), open_log(segments)).same


def test_a_changed_byte_in_an_early_segment_is_seen(tmp_path):
    """Though the next segment still carries the chained digest of what was there."""
    one = record(tmp_path / "one", arrivals=80, size=1500)
    shutil.copytree(one, tmp_path / "two")
    path = sorted((tmp_path / "two").iterdir())[1]
    start_item, *frames, _ = read([path.read_bytes()])
    place = next(n for n, frame in enumerate(frames) if any(isinstance(event, StepPlanned) for event in frame.events))
    data = codec.open_segment(start_item.header)[0]
    for number, frame in enumerate(frames):
        data += codec.encode_frame(frame.digest ^ (number == place), frame.body)
    path.write_bytes(data)
    found = diff(open_log(one), open_log(tmp_path / "two"))
    assert found.segments_equal == 1 and [field.name for field in found.fields] == ["chained digest"]


@pytest.mark.parametrize("seed", range(6))
def test_the_first_changed_event_is_named(tmp_path, seed):
    rng = random.Random(seed)
    log_dir = record(tmp_path / "log", "shape", seed=seed, arrivals=60)
    events = [each for item in open_log(log_dir).items() for each in getattr(item, "events", ())]
    commits = [number for number, event in enumerate(events, 1) if isinstance(event, StepCommitted) and event.tokens]
    at = rng.choice(commits)

    def change(number, event):
        if number < at or not isinstance(event, StepCommitted):
            return event
        return StepCommitted(step=event.step, tokens=event.tokens[:-4] + pack_tokens([1]))

    found = diff(open_log(log_dir), open_log(rewritten(log_dir, tmp_path / "changed", change)))
    event = events[at - 1]
    assert not found.same and (found.event, found.step, found.what) == (at, event.step, "StepCommitted")
    assert [field.name for field in found.fields] == [f"tokens[{len(event.tokens) // 4 - 1}]"] and found.fields[0].other == "1"


def test_a_changed_plan_and_a_changed_request_are_told_field_by_field(tmp_path):
    log_dir = record(tmp_path / "log", arrivals=60)

    def longer(number, event):
        if not isinstance(event, RequestArrived) or event.id < 20:
            return event
        return msgspec.structs.replace(event, priority=7, sampling=msgspec.structs.replace(event.sampling, max_tokens=99))

    found = diff(open_log(log_dir), open_log(rewritten(log_dir, tmp_path / "one", longer)))
    assert found.what == "RequestArrived" and [field.name for field in found.fields] == ["sampling.max_tokens", "priority"]

    def greedy(number, event):
        if not isinstance(event, StepPlanned) or not event.admitted or event.step < 30:
            return event
        return msgspec.structs.replace(event, admitted=event.admitted[:-1])

    found = diff(open_log(log_dir), open_log(rewritten(log_dir, tmp_path / "two", greedy)))
    assert found.what == "StepPlanned" and found.step >= 30 and [field.name for field in found.fields] == ["admitted"]


def test_settings_and_lengths_that_differ_are_told(tmp_path, capsys):
    one, two = record(tmp_path / "one"), record(tmp_path / "two", config=small_config(page_count=30))
    code, found = answer(capsys, "diff", one, two)
    assert code == 1 and [field["name"] for field in found["headers"]] == ["config.page_count"]
    short = tmp_path / "short"
    shutil.copytree(one, short)
    path = next(short.iterdir())
    _, *frames, _ = read([path.read_bytes()])
    path.write_bytes(path.read_bytes()[: -len(frames[-1].body) - 20])
    code, found = answer(capsys, "diff", one, short)
    assert code == 1 and found["fields"][0]["name"] == "end" and found["fields"][0]["other"].startswith("ends (torn")
    assert main(["diff", str(one), str(short)]) == 1 and "one log is longer" in " ".join(capsys.readouterr().out.split())


def test_the_same_bytes_with_another_state_are_seen(tmp_path):
    def change(events, state_digest, reports):
        wrong = any(isinstance(event, StepPlanned) and event.step == 9 for event in events)
        return events, state_digest ^ wrong, reports

    one, two = (record(tmp_path / name, change=by) for name, by in (("one", as_it_is), ("two", change)))
    frames = [[item for item in open_log(each).items() if isinstance(item, codec.Frame)] for each in (one, two)]
    data, chains = [], []
    for side, wrong in ((0, False), (1, True)):  # the same clock in both
        header = open_log((one, two)[side]).header
        segment, chain = codec.open_segment(header)
        for frame in frames[0]:
            step_9 = any(isinstance(event, StepPlanned) and event.step == 9 for event in frame.events)
            chain = codec.chained(chain, frame.digest ^ (wrong and step_9), frame.body)
            segment += codec.encode_frame(chain, frame.body)
        data.append(segment)
        chains.append(chain)
    for log_dir, segment in zip((one, two), data):
        (log_dir / codec.segment_name(0)).write_bytes(segment)
    found = diff(open_log(one), open_log(two))
    assert chains[0] != chains[1] and found.step == 9 and [field.name for field in found.fields] == ["chained digest"]


def as_it_is(events, state_digest, reports):
    return events, state_digest, reports


def test_arrival_times_count_only_if_they_are_asked_for(tmp_path, capsys):
    log_dir = record(tmp_path / "log")

    def late(number, event):
        return msgspec.structs.replace(event, arrival_ns=event.arrival_ns + 5) if isinstance(event, RequestArrived) else event

    other = rewritten(log_dir, tmp_path / "late", late)
    assert answer(capsys, "diff", log_dir, other)[0] == 0
    code, found = answer(capsys, "diff", log_dir, other, "--exact")
    assert code == 1 and [field["name"] for field in found["fields"]] == ["arrival_ns"]


# ---- ranks -------------------------------------------------------------------------------------------------------


def drifting(log_dir: Path, rank: int, step: int, privacy: str = "shape", size: int = 10**6) -> Path:
    """A log in which one rank's priority of its first row is one bit off from a step on, as it tells itself."""
    config, past = small_config(), []
    recorder = Recorder.open(log_dir, started(config), privacy, Bounds(segment_bytes=size))
    for events, befores, after, reports in engine(config, 3, 30):
        reported, past = [], [*past, *befores, after][-40:]
        for place, report in enumerate(reports):
            if report.rank == rank and report.step >= step:
                state = next(each for each in past if each.planned == report.step + 1)
                cells = state.rows.cells.copy()
                cells[9, 0] ^= 1
                wrong = msgspec.structs.replace(state, rows=type(state.rows)(cells))
                reports[place] = RankDigest(rank, report.step, digest(wrong))
                reported.append(RankDetail(rank, report.step, details(wrong), 0))
        recorder.append(events, befores, digest(after), reports, details=reported)
    recorder.close()
    return log_dir


def test_ranks_that_agree(tmp_path, capsys):
    code, found = answer(capsys, "ranks", record(tmp_path / "log"))
    assert code == 0 and found["same"] and [line["name"] for line in found["ranks"]] == ["rank 0", "rank 1"]
    assert all(line["reports"] > 20 and line["first_different_step"] == -1 for line in found["ranks"])


@pytest.mark.parametrize("size", [10**6, 3000])
def test_one_bit_of_one_rank_is_named_at_its_step_and_field(tmp_path, capsys, size):
    code, found = answer(capsys, "ranks", drifting(tmp_path / "log", rank=1, step=21, size=size))
    right, wrong = found["ranks"]
    assert code == 1 and right["first_different_step"] == -1 and right["reports"] > wrong["reports"] > 5
    assert (wrong["last_equal_step"], wrong["first_different_step"], wrong["fields"]) == (18, 21, ["rows.priority"])
    assert main(["ranks", str(tmp_path / "log")]) == 1
    reported = " ".join(capsys.readouterr().out.split())
    assert (
        "rank 1 has" in reported
        and "this began after step 18" in reported
        and "the ranks have drifted apart" in reported
    )


def test_ranks_of_an_older_log_are_compared_with_each_other(tmp_path, root):
    old = root / "tests" / "golden" / "logs" / "digest-1-start"
    found = ranks(old)
    assert found.same and found.compared == "the other ranks" and all(line.reports > 10 for line in found.ranks)


def test_one_log_for_each_rank(tmp_path, capsys):
    record(tmp_path / "run" / "rank-0", arrivals=30)
    for name in ("rank-1", "rank-2"):
        shutil.copytree(tmp_path / "run" / "rank-0", tmp_path / "run" / name)
    assert answer(capsys, "ranks", tmp_path / "run")[0] == 0

    def change(number, event):
        if not isinstance(event, StepPlanned) or not event.admitted or event.step < 12:
            return event
        return msgspec.structs.replace(event, admitted=())

    shutil.rmtree(tmp_path / "run" / "rank-2")
    rewritten(tmp_path / "run" / "rank-0", tmp_path / "run" / "rank-2", change)
    code, found = answer(capsys, "ranks", tmp_path / "run")
    assert code == 1 and [line["fields"] for line in found["ranks"]] == [[], [], ["admitted"]]
    assert found["ranks"][2]["first_different_step"] >= 12


@pytest.mark.parametrize(("other", "why"), [
    ({"config": small_config(page_count=30)}, "page_count is 30 in one and 24 in the other"),
    ({"seed": 9}, "is RequestArrived ("),
])  # fmt: skip
def test_logs_of_two_engines_are_no_ranks(tmp_path, capsys, other, why):
    record(tmp_path / "run" / "b", arrivals=6)
    record(tmp_path / "run" / "a", arrivals=6, **other)
    assert main(["ranks", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "b and a are not of one engine: " in said and why in said and said.count("\n") == 1


def test_an_index_is_not_needed_to_compare(tmp_path, monkeypatch):
    """diff folds nothing: it works where nothing can be folded."""
    log_dir = record(tmp_path / "log")
    monkeypatch.setattr(indexing, "first_state", None)
    assert diff(open_log(log_dir), open_log(log_dir)).same
