"""Logs of earlier versions keep folding; a log says how its digests were made, and a newer scheduler what it would change.

The logs in tests/golden/logs were written by the code of their day and are never written anew. When the way digests are
made changes, digest.DIGEST_VERSION goes up and a log of the version before is added.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from log_drive import engine, record, small_config, started

from vnext.log import codec
from vnext.log.codec import RankDetail, RankDigest
from vnext.log.reading import read
from vnext.replay.answers.stat import stat
from vnext.replay.cli.main import main
from vnext.replay.futures.redecided import recorded_events
from vnext.replay.reading import verify as verifying
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.verify import verify
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.record.recorder import Recorder
from vnext.state import digest as digests
from vnext.state.digest import DETAIL_NAMES, DIGEST_VERSION, details, digest
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    EnginePaused,
    RequestArrived,
    RequestResumed,
    StepPlanned,
    WeightsChanged,
)
from vnext.state.traits import line_of

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"
WHAT_THEY_HOLD = {"digest-1-start": (128, 50), "digest-1-ring": (201, 80), "digest-2": (260, 100), "digest-2-clocks": (142, 56),
                  "digest-2-agents": (178, 83), "digest-2-adapters": (412, 180), "digest-2-recoveries": (141, 55),
                  "digest-2-recoveries-shape": (142, 56), "digest-2-weights": (131, 46), "digest-2-weights-shape": (131, 46),
                  "digest-2-turns": (277, 114)}  # fmt: skip


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_golden_log_is_known() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(WHAT_THEY_HOLD)


@pytest.mark.parametrize("name", WHAT_THEY_HOLD)
def test_an_old_log_folds_and_decides_as_it_did(capsys, name):
    code, found = answer(capsys, "verify", GOLDEN / name, "--laws")
    assert code == 0 and found["decisions_differ"] == 0 and found["difference"] is None
    assert (found["events"], found["steps"]) == WHAT_THEY_HOLD[name]
    version = open_log(GOLDEN / name).header.digest_version
    assert version == int(name.split("-")[1])
    if version == DIGEST_VERSION:
        assert found["digests_unchecked"] == "" and found["digests"] > 0 and found["rank_digests"] > 0
    else:
        ours = f"this code computes version {DIGEST_VERSION}: states fold, digests not compared"
        assert found["digests_unchecked"] == f"written with digest version {version}; {ours}"
        assert found["digests"] == found["rank_digests"] == 0 < found["rank_digests_unchecked"]


def test_two_clocks_of_an_old_log_are_read_as_they_were() -> None:
    """Frames that tell a time, which nobody asks for any more, and stamps in their first form."""
    log = open_log(GOLDEN / "digest-2-clocks")
    bodies = [msgspec.msgpack.decode(item.body) for item in log.items() if isinstance(item, codec.Frame)]
    assert {len(body) for body in bodies} == {5, 7} and all(body[5] > 0 for body in bodies if len(body) == 7)
    timestamps = timestamps_of(log)
    assert timestamps.events.tolist() == [body[0] + len(body[1]) for body in bodies]
    assert timestamps.busy_ns == {step: int(1e-4 * (1 + step % 7) * 1e9) for step in range(56)}
    counted, read_all = info(log), [item for item in log.items() if isinstance(item, codec.Frame)]
    assert counted.frames == len(read_all) and stat(Index(log)).step_us


def test_an_old_log_of_agents_keeps_its_constraints(capsys):
    """A server of two ranks and 24 blocks answered chats, completions, responses and embeddings, some of them twice."""
    path = GOLDEN / "digest-2-agents"
    asked = [event.sampling for event in recorded_events(open_log(path)) if isinstance(event, RequestArrived)]
    bound = [sampling.constraint for sampling in asked if sampling.constraint is not None]
    assert [sum(map(bool, each)) for each in zip(*((one.grammar, one.allowed, one.banned) for one in bound))] == [4, 1, 1]
    assert sorted((sampling.prompt_logprobs, sampling.pooling) for sampling in asked)[-4:] == [(-1, 1), (-1, 1), (1, 0), (2, 0)]
    code, found = answer(capsys, "verify", path, "--grammar", "--model", DEMO_MODEL)
    assert (code, found["constrained_requests"], found["constrained_tokens"], found["rank_digests"]) == (0, 6, 220, 166)
    code, found = answer(capsys, "stat", path)
    assert code == 0 and found["preemptions"] == 5


def test_an_old_log_names_the_adapter_of_every_token(capsys):
    """Three adapters took turns in two slots; an independent fold says what the slots held when each step was planned."""
    path = GOLDEN / "digest-2-adapters"
    events = list(recorded_events(open_log(path)))
    names = {event.digest: event.name for event in events if isinstance(event, AdapterLoaded)}
    arrived = {event.id: event.sampling.adapter for event in events if isinstance(event, RequestArrived)}
    assert sorted(names.values()) == ["de", "fr", "sql"] and sum(isinstance(event, AdapterEvicted) for event in events) > 3
    held, holds = {}, {}
    for event in events:
        match event:
            case AdapterLoaded():
                held[event.slot] = event.digest
            case AdapterEvicted():
                del held[event.slot]
            case StepPlanned():
                holds[event.step] = set(held.values())
    for id_, digest_ in arrived.items():
        code, found = answer(capsys, "req", path, id_)
        tokens = [moment for moment in found["moments"] if moment["kind"] == "sampled"]
        assert code == 0 and len(tokens) == found["generated_tokens"] == 12
        assert {(each["adapter"], each["adapter_name"]) for each in tokens} == {(digest_, names.get(digest_, ""))}
        assert not digest_ or all(digest_ in holds[each["step"]] for each in tokens)
    one = next(id_ for id_, digest_ in arrived.items() if names.get(digest_) == "sql")
    assert main(["req", str(path), str(one)]) == 0
    assert f"with the adapter sql {arrived[one]}" in " ".join(capsys.readouterr().out.split())
    slots = answer(capsys, "show", path, 60)[1]["state"]["slots"]
    assert {slot["digest"]: slot["name"] for slot in slots}.items() <= names.items() and {slot["digest"] for slot in slots} == holds[60]
    assert all(arrived[id_] == slot["digest"] for slot in slots for id_ in slot["requests"]) and any(slot["requests"] for slot in slots)
    assert main(["show", str(path), "60"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{slot['name']} " in shown and slot["digest"] in shown for slot in slots)


@pytest.mark.parametrize("name", ["digest-2-recoveries", "digest-2-recoveries-shape"])
def test_an_old_log_tells_of_its_recoveries(capsys, name):
    """An engine that continued another one's log lost its ranks three times; every resumed request kept its answer."""
    path = GOLDEN / name
    found = answer(capsys, "info", path)[1]
    before = "/logs/before" if name == "digest-2-recoveries" else "before"
    assert (found["continues"]["log"], found["continues"]["frames"], found["continues"]["requests"]) == (before, 77, 4)
    assert found["recoveries"] == 3 and {each["cause"] for each in found["last_recoveries"]} == {"rank 1 was killed (signal 9)"}
    resumed = [event for event in recorded_events(open_log(path)) if isinstance(event, RequestResumed)]
    for event in resumed:
        life = answer(capsys, "req", path, event.id)[1]
        assert (life["resumed_tokens"], life["continues"]) == (len(event.generated) // 4, before)
    assert found["continues"]["tokens"] == sum(len(event.generated) // 4 for event in resumed) > 10


@pytest.mark.parametrize("name", ["digest-2-weights", "digest-2-weights-shape"])
def test_an_old_log_tells_of_its_weights(capsys, name):
    """In every mode, with requests that live on and compute their tokens again."""
    path = GOLDEN / name
    items = [item for item in fold(open_log(path)) if isinstance(item, Folded)]
    changes = [item for item in items if isinstance(item.event, WeightsChanged)]
    last = len(changes)
    assert [item.event.version for item in changes] == list(range(1, last + 1)) and last > 3
    assert {item.event.path for item in changes} == {"/secret/path" if name == "digest-2-weights" else ""}
    assert {item.event.mode for item in items if isinstance(item.event, EnginePaused)} == {"wait", "keep", "sleep", ""}
    assert answer(capsys, "info", path)[1]["weights"] == f"version {last} (digest {last})"
    lived_on = [(item, int(id_)) for item in changes for id_ in item.before.rows.id]
    assert lived_on
    for item, id_ in lived_on:
        moments = answer(capsys, "req", path, id_)[1]["moments"]
        notes = [moment["note"] for moment in moments if moment["event"] == item.number]
        assert notes == [f"{line_of(item.event)}: its tokens are computed anew"]


def test_turns_of_an_old_log_have_no_weights() -> None:
    """Clients took turns before requests had weights: each counts as 1, in tokens."""
    items = [item for item in fold(open_log(GOLDEN / "digest-2-turns")) if isinstance(item, Folded)]
    states = [item.after for item in items]
    assert {request.weight for state in states for request in state.requests.mapping().values()} == {1}
    assert max(len(state.clients.live) for state in states) > 3 and {state.clients.unit for state in states} == {1}


def test_the_newest_golden_log_is_of_our_version() -> None:
    """Whoever changes a digest without counting it up fails above; whoever counts it up adds a log here."""
    assert max(open_log(GOLDEN / name).header.digest_version for name in WHAT_THEY_HOLD) == DIGEST_VERSION


def test_other_digests_are_told_apart_from_drift(tmp_path, capsys, monkeypatch):
    log_dir = record(tmp_path / "log", size=2000)
    monkeypatch.setattr(verifying, "DIGEST_VERSION", DIGEST_VERSION + 1)
    monkeypatch.setattr(verifying, "digest", lambda state: digest(state) ^ 1)
    assert verify(open_log(log_dir)).same and verify(open_log(log_dir)).digests == 0
    assert main(["verify", str(log_dir)]) == 0
    assert "the log replays exactly; digests not compared" in capsys.readouterr().out
    monkeypatch.setattr(verifying, "DIGEST_VERSION", DIGEST_VERSION)
    assert verify(open_log(log_dir)).difference.field == "chained digest"


def test_a_newer_scheduler_says_which_decisions_would_differ(tmp_path, capsys, monkeypatch):
    """A scheduler that gives each admitted request one token less: the recorded plans are folded, the others are told."""
    from vnext.sched.schedule import schedule

    def stingy(state):
        plan = schedule(state)
        if plan is None or not plan.admitted:
            return plan
        return msgspec.structs.replace(plan, admitted=tuple((place, max(1, tokens - 1)) for place, tokens in plan.admitted))

    log_dir = record(tmp_path / "log")
    plans = [event for item in open_log(log_dir).items() for event in getattr(item, "events", ())]
    due = [each.step for each in plans if isinstance(each, StepPlanned) and any(n > 1 for _, n in each.admitted)]
    monkeypatch.setattr(verifying, "schedule", stingy)
    code, found = answer(capsys, "verify", log_dir)
    assert code == 1 and found["decisions_differ"] == len(due) > verifying.DECISIONS_SHOWN
    assert [each["step"] for each in found["decisions"]] == due[: verifying.DECISIONS_SHOWN]
    assert found["difference"] == found["decisions"][0] and found["difference"]["field"] == "plan.admitted"
    assert found["steps"] == sum(isinstance(each, StepPlanned) for each in plans), "it went on to the end"
    assert main(["verify", str(log_dir)]) == 1
    assert f"{len(due)} decisions of {found['steps']} would differ" in " ".join(capsys.readouterr().out.split())


def test_a_policy_of_a_log_is_not_imported_unasked(tmp_path, capsys, documented_policies):
    policy = f"{documented_policies}:shortest_job_first"
    log_dir = record(tmp_path / "log", config=small_config(policy=policy))
    code, found = answer(capsys, "verify", log_dir)
    assert code == 0 and "give --own-policy to import it" in found["plans_unchecked"] and found["digests"] > 0
    code, found = answer(capsys, "verify", log_dir, "--own-policy")
    assert code == 0 and found["plans_unchecked"] == ""


def test_what_a_rank_has_otherwise_is_named(tmp_path):
    """One bit of one row of rank 1, in one step: the log has the rank's words, and verify names the field."""
    recorder, config = Recorder.open(tmp_path, started(small_config()), "shape"), small_config()
    past = []
    for events, befores, after, ranks in engine(config, 3, 20):
        reported, past = [], [*past, *befores, after]
        for place, report in enumerate(ranks):
            if (report.rank, report.step) == (1, 12):
                state = next(each for each in past if each.planned == 13)
                cells = state.rows.cells.copy()
                cells[2, 0] ^= 1
                wrong = msgspec.structs.replace(state, rows=type(state.rows)(cells))
                ranks[place] = RankDigest(1, 12, digest(wrong))
                reported = [RankDetail(1, 12, details(wrong), 0)]
        recorder.append(events, befores, digest(after), ranks, details=reported)
    found = verify(open_log(tmp_path)).difference
    assert (found.step, found.field) == (12, "digest of rank 1")
    assert found.message == "rank 1 had another state in step 12: rows.computed"


def test_details_name_every_part_of_a_digest() -> None:
    state = [after for _, _, after, _ in engine(small_config(), 1, 10)][20]
    assert len(details(state)) == len(DETAIL_NAMES) == len(set(DETAIL_NAMES))
    assert len(digests.SCALAR_NAMES) == len(digests._scalars(state))
    assert details(state)[: len(digests.SCALAR_NAMES)] == digests._scalars(state)


def test_a_header_without_a_digest_version_is_of_the_first_and_closes_nothing(tmp_path):
    path = next(record(tmp_path / "log").iterdir())
    header = next(iter(read([path.read_bytes()]))).header
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(header))
    old = msgspec.msgpack.encode(plain[:-3])
    assert header.closes and not codec.header_decoder.decode(old).closes
    assert codec.header_decoder.decode(old).digest_version == 1 and plain[-3] == header.digest_version == DIGEST_VERSION
    assert header.frames_before == 0 and codec.header_decoder.decode(old).frames_before == -1
