"""vnext-replay: exact logs verify, every kind of change is named at its step, exit codes and errors are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from log_drive import engine, small_config, started

from vnext.replay.cli import main
from vnext.replay.folding import Folded, fold
from vnext.replay.life import life
from vnext.replay.render import printable
from vnext.replay.source import open_log
from vnext.replay.verify import verify
from vnext.runtime.recorder import Recorder
from vnext.state import log as logs
from vnext.state.digest import digest
from vnext.state.events import RequestAborted, RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.log import RankDigest
from vnext.state.log_read import read
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

CONFIG = small_config()


def as_it_is(events, state_digest, ranks):
    return events, state_digest, ranks


def record(log_dir: Path, privacy="full", config=CONFIG, seed=1, arrivals=40, change=as_it_is, size=10**6) -> Path:
    """A recorded engine. `change` may rewrite (events, digest, ranks) of a frame before it is written."""
    recorder = Recorder.open(log_dir, started(config), privacy, size)
    for events, befores, after, ranks in engine(config, seed, arrivals):
        events, state_digest, ranks = change(events, digest(after), ranks)
        recorder.append(events, befores, state_digest, ranks)
    recorder.close()
    return log_dir


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("privacy", ["full", "shape"])
@pytest.mark.parametrize(
    "changes", [{}, {"policy": "priority", "pipeline_depth": 1}, {"block_size": 1, "block_count": 90}]
)
def test_a_recorded_log_verifies_with_all_laws(tmp_path, capsys, seed, privacy, changes):
    log_dir = record(tmp_path / "log", privacy, small_config(**changes), seed, size=3000)
    code, found = answer(capsys, "verify", log_dir, "--laws")
    assert (code, found["same"], found["difference"]) == (0, True, None)
    assert found["steps"] > 40 and found["rank_digests"] > 20 and found["rank_digests_unchecked"] == 0
    assert len(list(log_dir.iterdir())) > 1 and found["laws"] == "all"


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
    data, place = logs.open_segment(start_item.header)[0], 20
    for number, frame in enumerate(frames):
        events = [_other_token(event) if number == place else event for event in frame.events]
        body = logs.encode_body(frame.first_event, events, frame.rank_digests, 0, start_item.header.token_width)
        data += logs.encode_frame(frame.digest, body)
    path.write_bytes(data)
    found = verify(open_log(log_dir)).difference
    assert found.field == "chained digest" and found.event >= frames[place].first_event


def _other_token(event):
    if not isinstance(event, StepCommitted):
        return event
    return StepCommitted(step=event.step, tokens=pack_tokens((unpack_tokens(event.tokens) + 1) % 6))


def test_a_torn_tail_is_a_shorter_log_and_damage_is_not(tmp_path, capsys):
    path = next(record(tmp_path / "log").iterdir())
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, found = answer(capsys, "verify", tmp_path / "log")
    assert code == 0 and found["end"]["kind"] == "torn" and found["end"]["ignored_bytes"] > 0
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
    assert code == 0 and found["frames_lost"] == 2


def test_info_counts_what_the_engine_did(tmp_path, capsys):
    log_dir = record(tmp_path / "log", size=2000)
    state, arrived = None, 0
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded):
            state, arrived = item.after, arrived + isinstance(item.event, RequestArrived)
    code, found = answer(capsys, "info", log_dir)
    assert code == 0 and found["requests"] == arrived == 40 and found["steps"] == state.planned
    assert found["preemptions"] == state.counters.preempted and found["segments"] == len(list(log_dir.iterdir()))
    assert found["size_bytes"] == sum(path.stat().st_size for path in log_dir.iterdir())
    assert found["schema_is_ours"] and found["end"]["kind"] == "complete"


def test_show_gives_the_state_in_which_a_step_ran(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    states = [item for item in fold(open_log(log_dir)) if isinstance(item, Folded)]
    at = next(item for item in states if isinstance(item.event, StepPlanned) and item.event.step == 17)
    code, found = answer(capsys, "show", log_dir, 17)
    assert code == 0 and found["digest"] == f"{digest(at.after):016x}" and found["event"] == at.number
    assert found["state"]["planned"] == 18 and len(found["state"]["running"]) == len(at.after.rows)
    code, found = answer(capsys, "show", log_dir)
    assert code == 0 and found["plan"] is None and found["digest"] == f"{digest(states[-1].after):016x}"


def test_a_life_accounts_for_every_token_and_step(tmp_path):
    log = open_log(record(tmp_path / "log", config=small_config(block_count=18), arrivals=50))
    told: dict[int, list] = {}
    preempted: dict[int, int] = {}
    for item in fold(log):
        if isinstance(item, Folded):
            for output in outputs(item.before, item.event, item.after):
                told.setdefault(output.id, []).append(output)
            if isinstance(item.event, StepPlanned):
                for row in item.event.preempted:
                    request_id = int(item.before.rows.id[row])
                    preempted[request_id] = preempted.get(request_id, 0) + 1
    assert preempted
    for request_id, news in told.items():
        found = life(log, request_id)
        assert found.generated_tokens == sum(output.token >= 0 for output in news)
        assert found.finish.split(" ")[0] == news[-1].finish and found.moments[0].kind == "arrived"
        assert found.preemptions == preempted.get(request_id, 0) and found.moments[-1].kind == "ended"
        admitted = [moment for moment in found.moments if moment.kind == "admitted"]
        computed = sum(moment.tokens for moment in found.moments if moment.kind == "computed")
        assert len(admitted) in (found.preemptions, found.preemptions + 1)
        if not found.finish.startswith("abort"):
            cached = sum(moment.tokens for moment in admitted)
            assert computed + cached >= found.prompt_tokens + found.generated_tokens - 1
        assert found.queued_steps <= found.waited_steps


def test_every_command_prints_tables(tmp_path, capsys):
    log_dir = str(record(tmp_path / "log", "shape"))
    for arguments, word in ((["info", log_dir], "privacy"), (["verify", log_dir], "replays exactly"),
                            (["show", log_dir, "5"], "running"), (["req", log_dir, "0"], "arrived")):  # fmt: skip
        assert main(arguments) == 0
        assert word in capsys.readouterr().out


def test_a_configuration_that_cannot_work_is_refused(tmp_path, capsys):
    Recorder.open(tmp_path / "log", started(small_config(block_size=0)), "full").close()
    assert main(["verify", str(tmp_path / "log")]) == 2 and "block_size is 0" in capsys.readouterr().err


def test_a_clients_name_cannot_reach_the_terminal():
    assert printable("a\x1b[31m[red]b\n") == "a?[31m[red]b?"


def test_inputs_that_cannot_be_used_exit_with_two_and_one_sentence(tmp_path, capsys):
    log_dir = record(tmp_path / "logs" / "one", size=2000)
    (tmp_path / "noise.vnextlog").write_bytes(b"no log at all")
    (tmp_path / "empty").mkdir()
    cases = (
        (["info", tmp_path / "absent"], "there is no log at"),
        (["verify", tmp_path / "noise.vnextlog"], "not a segment of a vnext log"),
        (["verify", tmp_path / "empty"], "give a log directory"),
        (["verify", tmp_path / "logs"], "it holds the logs one; name one of them"),
        (["verify", sorted(log_dir.iterdir())[1]], "give the directory that holds all its segments"),
        (["show", log_dir, 10**6], "step 1000000 is not in this log: it has steps 0 to"),
        (["req", log_dir, 10**6], "it holds requests 0 to 39"),
    )
    for arguments, sentence in cases:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err.replace("\n", "")
        assert sentence in error and error.startswith("vnext-replay: ")


def test_one_segment_file_is_a_log_too(tmp_path, capsys):
    log_dir = record(tmp_path / "log", size=2000)
    first = sorted(log_dir.iterdir())[0]
    code, found = answer(capsys, "verify", first)
    assert code == 0 and found["end"]["kind"] == "complete"


def test_a_missing_segment_ends_the_log_there(tmp_path, capsys):
    log_dir = record(tmp_path / "log", size=2000)
    sorted(log_dir.iterdir())[1].unlink()
    code, found = answer(capsys, "verify", log_dir)
    assert code == 1 and found["end"]["kind"] == "unchained" and found["difference"] is None


def test_the_tool_needs_no_torch(tmp_path):
    log_dir = record(tmp_path / "log")
    program = (
        "import sys; from vnext.replay.cli import main; code = main(['verify', sys.argv[1]]); "
        "assert not {'torch', 'zmq', 'asyncio'} & set(sys.modules); sys.exit(code)"
    )
    arguments = [sys.executable, "-c", program, str(log_dir)]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_aborts_are_told(tmp_path):
    log = open_log(record(tmp_path / "log", seed=2, arrivals=60))
    aborted = [item for item in fold(log) if isinstance(item, Folded) and isinstance(item.event, RequestAborted)]
    true = next(item for item in aborted if item.event.ids[0] in item.before.requests)
    assert life(log, true.event.ids[0]).finish == "abort (client)"
