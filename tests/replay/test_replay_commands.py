"""vnext-replay: exact logs verify, every kind of change is named at its step, exit codes and errors are right."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from log_drive import drawn_config, engine, record, small_config, started

from vnext.log import codec, snapshot as snapshots
from vnext.log.codec import RankDigest
from vnext.log.reading import read
from vnext.replay.cli.main import MODULES, main, parser
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.verify import verify
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.digest import digest
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

CONFIG = small_config()


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("place", ["vnext.replay.cli.main.import_module", "vnext.replay.reading.verify.verify"])
def test_ctrl_c_is_one_line_and_130(tmp_path, capsys, monkeypatch, place):
    """While the command is loaded, and while it runs."""
    log_dir = record(tmp_path / "log", size=3000)
    monkeypatch.setattr(place, lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    assert main(["verify", str(log_dir)]) == 130
    said = capsys.readouterr()
    assert said.err == "vnext-replay: interrupted\n" and not said.out


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize(
    "changes", [{}, {"policy": "priority", "pipeline_depth": 1}, {"block_size": 1, "page_count": 90}]
)
def test_a_recorded_log_verifies_with_all_laws(tmp_path, capsys, seed, privacy, changes):
    log_dir = record(tmp_path / "log", privacy, small_config(**changes), seed, size=3000)
    code, found = answer(capsys, "verify", log_dir, "--laws")
    assert (code, found["same"], found["difference"]) == (0, True, None)
    assert found["steps"] > 40 and found["rank_digests"] > 20 and found["rank_digests_unchecked"] == 0
    assert len(list(log_dir.iterdir())) > 1 and found["laws"] == "all"


@pytest.mark.parametrize("seed", range(12))
def test_any_small_engine_verifies_from_its_shape(tmp_path, seed):
    """Own stop ids and end tokens at block ends, repeated by later prompts, at every depth of the pipeline."""
    log_dir = record(tmp_path / "log", "shape", drawn_config(random.Random(seed)), seed)
    verdict = verify(open_log(log_dir), all_laws=True)
    assert verdict.same, verdict.difference


def differs(tmp_path, change) -> msgspec.Struct:
    verdict = verify(open_log(record(tmp_path / "log", change=change)))
    assert not verdict.same and verdict.difference is not None
    return verdict.difference


def test_a_digest_that_is_not_the_states_is_named(tmp_path):
    def change(events, state_digest, ranks):
        wrong = any(isinstance(event, StepPlanned) and event.step == 7 for event in events)
        return events, state_digest ^ wrong, ranks

    found = differs(tmp_path, change)
    assert (found.step, found.field) == (7, "chained digest") and found.recorded != found.recomputed


def test_a_rank_that_drifted_is_named_at_its_step(tmp_path):
    def change(events, state_digest, ranks):
        return events, state_digest, [
            RankDigest(rank.rank, rank.step, rank.digest ^ (1 << 63 if (rank.rank, rank.step) == (1, 12) else 0))
            for rank in ranks
        ]  # fmt: skip

    found = differs(tmp_path, change)
    assert (found.step, found.field) == (12, "digest of rank 1") and "rank 1" in found.message


def test_a_decision_that_the_scheduler_would_not_take_is_named_by_its_field(tmp_path):
    """The first admission is recorded with one token less than the scheduler gives it: legal, and another decision."""
    state, recorder = start(started(CONFIG)), Recorder.open(tmp_path / "log", started(CONFIG), "full")
    arrival = RequestArrived(
        id=0, name="n", prompt=pack_tokens([1] * 9), sampling=Sampling(seed=1, max_tokens=4), priority=0, arrival_ns=0
    )
    for event in (arrival, StepPlanned(step=0, admitted=((0, 8),))):
        after = reduce(state, event)
        recorder.append([event], [state], digest(after))
        state = after
    found = verify(open_log(tmp_path / "log")).difference
    assert (found.step, found.event, found.field) == (0, 2, "plan.admitted")
    assert (found.recorded, found.recomputed) == ("((0, 8),)", "((0, 9),)")


def test_an_event_that_may_not_happen_is_named(tmp_path):
    def change(events, state_digest, ranks):
        return [
            StepCommitted(step=event.step + 1, tokens=event.tokens)
            if isinstance(event, StepCommitted) and event.step == 5 else event
            for event in events
        ], state_digest, ranks  # fmt: skip

    found = differs(tmp_path, change)
    assert found.field == "event" and "step 6 committed where step 5 is due" in found.message


def test_a_changed_token_that_changes_a_decision_is_found(tmp_path):
    """A sampled token rewritten in a stored frame, checksum repaired: the chain does not fit any more."""
    log_dir = record(tmp_path / "log")
    path = next(log_dir.iterdir())
    start_item, *frames, _ = read([path.read_bytes()])
    data, place = codec.open_segment(start_item.header)[0], 20
    for number, frame in enumerate(frames):
        events = [_other_token(event) if number == place else event for event in frame.events]
        width = start_item.header.token_width
        body = codec.encode_body(frame.first_event, events, frame.rank_digests, 0, width)
        data += codec.encode_frame(frame.digest, body)
    path.write_bytes(data)
    found = verify(open_log(log_dir)).difference
    assert found.field == "chained digest" and found.event >= frames[place].first_event


def _other_token(event):
    if not isinstance(event, StepCommitted):
        return event
    return StepCommitted(step=event.step, tokens=pack_tokens((unpack_tokens(event.tokens) + 1) % 6))


def test_a_log_cut_at_any_byte_behind_its_header_verifies(tmp_path, capsys):
    log_dir = record(tmp_path / "log", "shape", arrivals=3)
    path = next(log_dir.iterdir())
    data, steps = path.read_bytes(), []
    header_size = len(codec.open_segment(open_log(log_dir).header)[0])
    for size in range(header_size, len(data), 5):
        path.write_bytes(data[:size])
        verdict = verify(open_log(log_dir))
        assert verdict.same and verdict.end.offset_bytes + verdict.end.ignored_bytes == size
        steps.append(verdict.steps)
    assert steps == sorted(steps) and steps[-1] > steps[0] == 0


def test_a_killed_engine_leaves_a_log_that_verifies(tmp_path, capsys):
    program = (
        "import os, sys; from log_drive import engine, small_config, started; from vnext.state.digest import digest; "
        "from vnext.runtime.record.recorder import Recorder; from vnext.runtime.record.segments import Bounds\n"
        "recorder = Recorder.open(sys.argv[1], started(small_config()), 'shape', Bounds(segment_bytes=3000))\n"
        "for number, (events, befores, after, ranks) in enumerate(engine(small_config(), 1, 40)):\n"
        "    recorder.append(events, befores, digest(after), ranks)\n"
        "    if number == 70: os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "tests")))
    arguments = [sys.executable, "-c", program, str(tmp_path / "log")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, env={"PYTHONPATH": paths})
    assert done.returncode == -9, done.stderr
    code, found = answer(capsys, "verify", tmp_path / "log")
    assert code == 0 and found["end"]["kind"] == "complete" and found["digests"] == 71


def test_a_torn_tail_is_told_in_words_and_damage_is_an_error(tmp_path, capsys):
    path = next(record(tmp_path / "log").iterdir())
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, found = answer(capsys, "verify", tmp_path / "log")
    assert code == 0 and found["end"]["kind"] == "torn" and found["end"]["ignored_bytes"] > 0
    assert main(["verify", str(tmp_path / "log")]) == 0
    assert "replays exactly up to its torn end" in capsys.readouterr().out
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    code, found = answer(capsys, "verify", tmp_path / "log")
    assert code == 1 and found["end"]["kind"] in ("damaged", "torn") and found["difference"] is None
    assert main(["verify", str(tmp_path / "log")]) == 1 and "damaged" in capsys.readouterr().out


def test_a_gap_is_reported(tmp_path, capsys):
    recorder = Recorder.open(tmp_path / "log", started(CONFIG), "full")
    for number, (events, befores, after, ranks) in enumerate(engine(CONFIG, 4, 10)):
        if number == 4:
            recorder._lost_now, recorder._next_event = 2, recorder._next_event + 3
        recorder.append(events, befores, digest(after), ranks)
    code, found = answer(capsys, "verify", tmp_path / "log")
    assert code == 1 and found["difference"]["field"] == "gap"
    assert "2 frames are missing" in found["difference"]["message"]
    code, found = answer(capsys, "info", tmp_path / "log")
    assert code == 1 and found["frames_lost"] == 2 and found["ended"].startswith("frames lost: 2 before frame")


def test_a_configuration_that_cannot_work_is_refused(tmp_path, capsys):
    Recorder.open(tmp_path / "log", started(small_config(block_size=0)), "full").close()
    assert main(["verify", str(tmp_path / "log")]) == 2 and "block_size is 0" in capsys.readouterr().err


def test_inputs_that_cannot_be_used_exit_with_two_and_one_sentence(tmp_path, capsys):
    log_dir = record(tmp_path / "logs" / "one", size=2000)
    record(tmp_path / "replicas" / "engine-1" / "a", size=2000), record(tmp_path / "replicas" / "engine-0" / "b", size=2000)
    (tmp_path / "noise.vnextlog").write_bytes(b"no log at all")
    (tmp_path / "empty").mkdir()
    header = open_log(sorted(log_dir.iterdir())[1]).header
    for name, snapshot in (("middle", b""), ("other", b"no state")):
        without = msgspec.structs.replace(header, snapshot=snapshot)
        (tmp_path / f"{name}.vnextlog").write_bytes(codec.open_segment(without)[0])
    cases = (
        (["info", tmp_path / "absent"], "there is no log at"),
        (["verify", tmp_path / "noise.vnextlog"], "not a segment of a vnext log"),
        (["verify", tmp_path / "empty"], "give a log directory"),
        (["verify", tmp_path / "logs"], "it holds the logs one; name one of them"),
        (["verify", tmp_path / "replicas"], "it holds the logs engine-1/a, engine-0/b; name one of them"),
        (["verify", tmp_path / "replicas" / "engine-0"], "it holds the logs b; name one of them"),
        (["verify", tmp_path / "middle.vnextlog"], "give the directory that holds all its segments"),
        (["verify", tmp_path / "other.vnextlog"], "its snapshot is of no use"),
        (["show", log_dir, 10**6], "step 1000000 is not in this log: it has steps 0 to"),
        (["req", log_dir, 10**6], "it holds requests 0 to 39"),
    )
    for arguments, sentence in cases:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err.replace("\n", "")
        assert sentence in error and error.startswith("vnext-replay: ")


@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize("seed", range(6))
def test_every_segment_file_is_a_log_too(tmp_path, capsys, privacy, seed):
    """Folded from its snapshot it leads to the same digests; and the whole log's snapshots are its states."""
    log_dir = record(tmp_path / "log", privacy, drawn_config(random.Random(seed)), seed, arrivals=150, size=2000)
    whole = verify(open_log(log_dir), all_laws=True)
    assert whole.same and whole.snapshots == len(list(log_dir.iterdir())) - 1 > 1, whole.difference
    events = 0
    for path in sorted(log_dir.iterdir()):
        verdict = verify(open_log(path), all_laws=True)
        assert verdict.same and verdict.first_event == events + 1, verdict.difference
        events += verdict.events
    assert events == whole.events


def test_a_log_whose_beginning_is_deleted_says_so_and_answers_for_the_rest(tmp_path, capsys):
    log_dir = record(tmp_path / "log", "shape", arrivals=300, size=2000)
    whole = verify(open_log(log_dir))
    for path in sorted(log_dir.iterdir())[:2]:
        path.unlink()
    first_event = open_log(log_dir).header.first_event
    code, found = answer(capsys, "verify", log_dir)
    assert code == 0 and found["first_event"] == first_event > 100 and found["events"] < whole.events
    assert main(["verify", str(log_dir)]) == 0
    reported = " ".join(capsys.readouterr().out.split())
    assert f"from event {first_event} on: the older ones are not here" in reported and "the log replays exactly" in reported
    assert main(["info", str(log_dir)]) == 0
    reported = " ".join(capsys.readouterr().out.split())
    assert f"later, at event {first_event}: 2 older segments not here; it is replayed from the state" in reported
    begin = first_state(open_log(log_dir))
    assert main(["show", str(log_dir), "0"]) == 2
    assert f"it has steps {begin.planned} to" in capsys.readouterr().err.replace("\n", " ")
    alive = min(id_ for id_, _ in begin.requests.items())
    code, found = answer(capsys, "req", log_dir, alive)
    assert code == 0 and found["id"] == alive and found["finish"] and found["moments"][0]["kind"] != "arrived"
    assert main(["req", str(log_dir), "0"]) == 2
    assert f"it holds requests {begin.next_id} to 299 and {len(begin.requests)} older ones" in capsys.readouterr().err


def full_disk(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("field, change", [("committed", 1), ("head", 1), ("next_id", 1), ("tables", b"")])
def test_a_snapshot_that_is_not_the_state_is_named(tmp_path, field, change):
    log_dir = record(tmp_path / "log", arrivals=150, size=2000)
    path = sorted(log_dir.iterdir())[1]
    start_item, *frames, _ = read([path.read_bytes()])
    frame = snapshots.decode(start_item.header.snapshot)
    wrong = change if isinstance(change, bytes) else getattr(frame, field) + change
    frame = msgspec.structs.replace(frame, **{field: wrong})
    data, chain = codec.open_segment(msgspec.structs.replace(start_item.header, snapshot=snapshots.encode(frame, 2)))
    for each in frames:
        data += codec.encode_frame(each.digest, each.body)
    path.write_bytes(data)
    found = verify(open_log(log_dir)).difference
    assert found.field == f"snapshot.{field}" and "snapshot of segment 1 is not the state" in found.message
    if field == "head":  # a state that could be, with other digests
        assert verify(open_log(path)).difference.field == "chained digest"
        return
    with pytest.raises(UnusableLog, match="its snapshot is of no use"):
        verify(open_log(path))


def test_frames_lost_before_a_segment_do_not_touch_it(tmp_path, monkeypatch):
    """From the next snapshot on the log replays again, though what was lost is lost."""
    recorder = Recorder.open(tmp_path, started(CONFIG), "shape", Bounds(segment_bytes=2000))
    for number, (events, befores, after, ranks) in enumerate(engine(CONFIG, 4, 150)):
        with monkeypatch.context() as patch:
            if number in (20, 21):
                patch.setattr(os, "write", full_disk)
            recorder.append(events, befores, digest(after), ranks)
    gap = verify(open_log(tmp_path)).difference
    later = [log for log in map(open_log, sorted(tmp_path.iterdir())) if log.header.first_event > gap.event]
    assert gap.field == "gap" and recorder.frames_lost == 2 and len(later) > 2
    assert all(verify(log).same for log in later)


def test_a_missing_segment_ends_the_log_there(tmp_path, capsys):
    log_dir = record(tmp_path / "log", size=2000)
    sorted(log_dir.iterdir())[1].unlink()
    code, found = answer(capsys, "verify", log_dir)
    assert code == 1 and found["end"]["kind"] == "unchained" and found["difference"] is None


def test_a_command_imports_what_it_needs_and_none_imports_torch(tmp_path):
    log_dir = record(tmp_path / "log")
    assert Index(open_log(log_dir)).last, "an index is made once, by the scheduler's strides"
    program = (
        "import sys; from vnext.replay.cli.main import main, parser; code = main(['show', sys.argv[1]]); "
        "others = [name for name in sys.modules if name.startswith(('vnext.sched', 'rich.progress', 'vnext.replay.cli.')) and name != 'vnext.replay.cli.main']; "
        "assert others == ['vnext.replay.cli.log'], others; "
        "parser(); code += main(['verify', sys.argv[1]]); "
        "assert not {'torch', 'zmq', 'asyncio'} & set(sys.modules); sys.exit(code)"
    )
    arguments = [sys.executable, "-c", program, str(log_dir)]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_each_command_is_declared_by_the_module_that_the_table_names():
    def declared(asked: str = "") -> list[str]:
        return list(next(action.choices for action in parser(asked)._actions if action.choices))

    assert declared() == [name for names in MODULES.values() for name in names]
    assert all(declared(name) == list(names) for names in MODULES.values() for name in names)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_went_away_is_no_difference(tmp_path, root, options):
    log_dir = record(tmp_path / "log", "full", CONFIG, 1, size=3000)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "vnext.replay", "info", str(log_dir), *options]
    ran = subprocess.run(command, cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")
