"""vnext-replay watch: reads a log as it grows, raises an alarm within three steps, and none for a healthy engine."""

from __future__ import annotations

import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from threading import Thread, Timer

import pytest
from log_drive import engine, record, small_config, started
from msgspec.structs import replace

from tests.sim.scenario_draw import draw_clients, draw_config
from vnext.log.codec import Frame, SegmentStart
from vnext.replay.answers.watch import IDLE_FRAMES, StuckDetector, Watcher, follow
from vnext.replay.cli.main import main
from vnext.replay.futures.forking import FutureOptions, future_of
from vnext.replay.reading.source import open_log
from vnext.replay.reading.tail import Damaged, Tail, is_kept
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.retention import lock_folder
from vnext.sched.schedule import schedule
from vnext.sim.rng import Rng
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.feasibility import refusal
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

STEPS_WATCHED = 100_000
SOON_STEPS = 3


def items_of(log_dir: Path) -> list[SegmentStart | Frame]:
    return [item for item in open_log(log_dir).items() if isinstance(item, (SegmentStart, Frame))]


# ---- a log that grows --------------------------------------------------------------------------------------------


def test_a_growing_log_is_read_once_and_whole(tmp_path):
    """Bytes come in pieces that know nothing of records; segments follow each other."""
    whole, live = record(tmp_path / "whole", size=3000, arrivals=80), tmp_path / "live"
    live.mkdir()
    rng, found, tail = Rng(3), [], None
    for path in sorted(whole.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = 3000 if at == 0 else 1 + rng.below(200)
            with (live / path.name).open("ab") as file:
                file.write(data[at : at + size])
            at += size
            tail = tail or Tail(live)
            found += tail.news()
    assert found == items_of(whole) and len(list(whole.iterdir())) > 3


def test_it_begins_with_the_newest_segment_or_the_first(tmp_path):
    log_dir = record(tmp_path / "log", size=3000, arrivals=80)
    newest, whole = Watcher(Tail(log_dir).log), Watcher(Tail(log_dir, whole=True).log)
    for watcher, tail in ((newest, Tail(log_dir)), (whole, Tail(log_dir, whole=True))):
        for item in tail.news():
            assert watcher.take(item) is None, watcher.alarm
    assert newest.state.sequence == whole.state.sequence and newest.events < whole.events
    assert digest(newest.state) == digest(whole.state)


def test_a_segment_that_the_ring_has_deleted_is_passed(tmp_path):
    log_dir, live = record(tmp_path / "log", size=3000, arrivals=80), tmp_path / "live"
    live.mkdir()
    paths = sorted(log_dir.iterdir())
    shutil.copy(paths[0], live)
    tail = Tail(live)
    first = list(tail.news())
    for path in paths[1:3]:
        shutil.copy(path, live)
    (live / paths[0].name).unlink()
    assert [*first, *tail.news()] == items_of(log_dir)[: len(first)] + [
        item for path in paths[1:3] for item in items_of(path)
    ]  # fmt: skip


def test_damage_is_an_alarm(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    path = next(log_dir.iterdir())
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    tail = Tail(log_dir)
    with pytest.raises(Damaged, match="checksum"):
        list(tail.news())
    capsys.readouterr()
    assert main(["watch", str(log_dir), "--once"]) == 1
    assert f"ask vnext-replay verify {log_dir}\n" in capsys.readouterr().out, "a smaller log says nothing of damage"


def test_a_next_segment_is_followed_when_its_header_is_whole_and_an_alarm_if_it_is_none(tmp_path):
    log_dir = record(tmp_path / "log", size=2000)
    path = sorted(log_dir.iterdir())[1]
    data, header_size = path.read_bytes(), 16 + int.from_bytes(path.read_bytes()[8:12], "little")
    path.write_bytes(b"")
    tail = Tail(log_dir, whole=True)
    before = len(list(tail.news()))
    for size in (0, 7, 12, 100, header_size - 1):
        path.write_bytes(data[:size])
        assert list(tail.news()) == [], "it is still being written"
    path.write_bytes(data)
    assert len(list(tail.news())) > 10 and before > 10
    for bad in (b"x" * 8 + data[8:], data[:20] + bytes([data[20] ^ 1]) + data[21:]):
        path.write_bytes(bad)
        with pytest.raises(Damaged):
            list(Tail(log_dir, whole=True).news())
        assert main(["watch", str(log_dir), "--once", "--whole"]) == 1


# ---- the command -------------------------------------------------------------------------------------------------


def test_a_healthy_log_is_well(tmp_path, capsys):
    log_dir = record(tmp_path / "logs" / "one", "shape", arrivals=60)
    assert main(["watch", str(log_dir), "--once", "--laws", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["alarm"] is None and answer["steps"] > 60 and answer["running"] == 0
    assert main(["watch", str(tmp_path / "logs"), "--live", "--once"]) == 0
    assert "all is well" in capsys.readouterr().out


def test_a_log_that_its_engine_has_closed_ends_the_watch_and_a_later_start_goes_on(tmp_path, capsys):
    logs = tmp_path / "logs"
    one = record(logs / "20261130-100000-1-1", arrivals=20, timestamped=True)
    assert main(["watch", str(one)]) == 0
    said = capsys.readouterr().out
    assert "all is well" in said and "the engine has closed this log; it last wrote at " in said and " UTC" in said
    assert main(["watch", str(logs), "--live", "--json"]) == 0 and json.loads(capsys.readouterr().out)["closed"]
    late = Timer(0.3, record, (logs / "20261130-100001-1-1",), {"arrivals": 20, "change": wrong_in_step(5)})
    late.start()
    assert main(["watch", str(logs), "--live", "--wait"]) == 1
    late.join()
    said = capsys.readouterr().out
    assert said.index("has closed this log") < said.index("digest at step 5") and "100001-1-1" in said
    assert main(["watch", str(one), "--wait"]) == 2 and "give --live too" in capsys.readouterr().err


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_closed_log_is_not_waited_for(tmp_path, monkeypatch, is_planted):
    """Planted: a watch that does not see the frame with which an engine closes its log, and so would follow it for ever."""
    if is_planted:
        monkeypatch.setattr("vnext.log.codec.is_closing", lambda frame: False)
    tail, polls = Tail(record(tmp_path / "log", arrivals=20)), count()
    watcher = Watcher(tail.log)

    def sleep(seconds: float) -> None:
        if next(polls) == SOON_STEPS:
            raise TimeoutError

    try:
        follow(tail, watcher, 60, False, lambda *_: True, sleep=sleep)
    except TimeoutError:
        assert is_planted and not watcher.closed and watcher.alarm is None
    else:
        assert not is_planted and watcher.closed and next(polls) == 0


def test_a_log_whose_engine_was_killed_says_that_nobody_has_it_open(tmp_path, capsys, monkeypatch):
    """Without requests no step hangs, so there is no alarm. With --live a later start's log ends the watch."""
    logs = tmp_path / "logs"
    path = next(record(logs / "20261130-100000-1-1", arrivals=20).iterdir())
    path.write_bytes(path.read_bytes()[: -len(items_of(path)[-1].body) - 16])
    record(logs / "20261130-100001-1-1", arrivals=2)
    os.utime(path)
    assert not is_kept(path.parent)
    lock = lock_folder(path.parent)
    assert is_kept(path.parent)
    os.close(lock)
    monkeypatch.setattr("vnext.replay.answers.watch.TOLD_EVERY_S", 0.2)
    clock, tail, told = count(0, 5), Tail(path), []
    follow(
        tail, Watcher(tail.log), 30.0, False, lambda watcher, quiet_s: told.append(quiet_s) or len(told) < 4,
        now=lambda: float(next(clock)), sleep=lambda seconds: None,
    )  # fmt: skip
    assert told == sorted(told) and told[-1] > 10, "it follows the log until it is told to stop"
    assert main(["watch", str(logs), "--live"]) == 0
    assert "no engine of this machine has this log open" in capsys.readouterr().out


def test_a_webhook_hears_of_an_alarm_and_of_nothing_else(tmp_path, capsys):
    """The server that hears answers with a status; one that refuses, or is not there, is named, and the alarm counts."""
    heard, statuses = [], [200, 500]

    class Hears(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_):
            pass

    log_dir = record(tmp_path / "log")
    server = HTTPServer(("127.0.0.1", 0), Hears)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    assert main(["watch", str(log_dir), "--once", "--webhook", "ftp://here"]) == 2 and "must begin with" in capsys.readouterr().err
    hook = ["--webhook", f"http://127.0.0.1:{server.server_port}/alarms"]
    try:
        assert main(["watch", str(log_dir), "--once", *hook]) == 0 and not heard
        path = next(log_dir.iterdir())
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        assert main(["watch", str(log_dir), "--once", *hook, "--json"]) == 1
        said = capsys.readouterr()
        assert heard[0]["alarm"] == json.loads(said.out.splitlines()[-1])["alarm"] and heard[0]["log"] == str(log_dir) and not said.err
        assert heard[0]["text"].startswith(f"{log_dir}: damaged at step ")
        assert main(["watch", str(log_dir), "--once", *hook]) == 1 and "did not reach http" in capsys.readouterr().err
        assert len(heard) == 2
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert main(["watch", str(log_dir), "--once", *hook]) == 1 and "did not reach http" in capsys.readouterr().err


def test_bad_inputs_are_one_sentence(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    assert main(["watch", str(tmp_path), "--live", "--silent", "0"]) == 2
    assert main(["watch", str(log_dir), "--live"]) == 2
    assert "holds no log" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "nothing")]) == 2


# ---- alarms ------------------------------------------------------------------------------------------------------


def alarm_of(log_dir: Path) -> tuple[str, int]:
    watcher = Watcher(open_log(log_dir))
    for item in items_of(log_dir):
        if watcher.take(item) is not None:
            return watcher.alarm.kind, watcher.alarm.step
    return "", -1


def wrong_in_step(step: int):
    def change(events, state_digest, ranks):
        wrong = any(isinstance(event, StepPlanned) and event.step == step for event in events)
        return events, state_digest ^ wrong, ranks

    return change


def test_a_state_that_is_not_the_engines_is_noticed_in_its_step(tmp_path):
    assert alarm_of(record(tmp_path / "log", change=wrong_in_step(17))) == ("digest", 17)


def test_a_decision_that_is_not_the_schedulers_is_noticed_in_its_step(tmp_path):
    recorder, due = Recorder.open(tmp_path / "log", started(small_config()), "full"), -1
    for events, befores, after, _ in engine(small_config(), 2, 40):
        plan = events[-1] if events else None
        if due < 0 and isinstance(plan, StepPlanned) and plan.step > 10 and plan.admitted and plan.admitted[0][1] > 1:
            place, tokens = plan.admitted[0]
            due, events = plan.step, [*events[:-1], replace(plan, admitted=((place, tokens - 1), *plan.admitted[1:]))]
            after = reduce(befores[-1], events[-1])
        recorder.append(events, befores, digest(after))
        if due >= 0:
            break
    assert alarm_of(tmp_path / "log") == ("decision", due) and due > 10


def test_an_idle_engine_is_noticed_within_three_steps(tmp_path):
    """It stops planning while requests come: the alarm rises with the third frame without a plan."""
    config = small_config()
    recorder, state = Recorder.open(tmp_path / "log", started(config), "full"), start(started(config))
    for number in range(6):
        arrival = arrival_of(number)
        before, state = state, reduce(state, arrival)
        recorder.append([arrival], [before], digest(state))
    watcher = Watcher(open_log(tmp_path / "log"))
    frames = [watcher.take(item) for item in items_of(tmp_path / "log")]
    assert [alarm is not None for alarm in frames] == [False] * IDLE_FRAMES + [True] * (len(frames) - IDLE_FRAMES)
    assert watcher.alarm.kind == "stuck" and "idle" in watcher.alarm.message and IDLE_FRAMES <= SOON_STEPS


def test_a_scheduler_that_gives_up_is_noticed_at_once(tmp_path, monkeypatch):
    config = small_config()
    recorder, state = Recorder.open(tmp_path / "log", started(config), "full"), start(started(config))
    recorder.append([arrival_of(0)], [state], digest(reduce(state, arrival_of(0))))
    monkeypatch.setattr("vnext.replay.answers.watch.schedule", lambda state: None)
    watcher = Watcher(open_log(tmp_path / "log"))
    assert watcher.take(items_of(tmp_path / "log")[1]).message.startswith("law S6")


def arrival_of(number: int) -> RequestArrived:
    sampling = Sampling(seed=0, max_tokens=3)
    return RequestArrived(id=number, name="", prompt=pack_tokens([1, 2, 3]), sampling=sampling, priority=0, arrival_ns=0)


def test_a_livelock_is_noticed():
    """Two requests take turns and drop what was computed: nobody is ever told a token."""
    config = small_config(
        page_count=15, max_num_seqs=2, long_prefill_token_threshold=2, pipeline_depth=1, prefix_caching=False
    )
    state, detector = start(started(config)), StuckDetector()
    for number in range(2):
        arrival = replace(arrival_of(number), prompt=pack_tokens([1] * 40))
        state = reduce(state, arrival)
        assert detector.event(arrival, state) == ""
    said, steps = "", 0
    while not said and steps < 2_000:
        if len(state.rows) and int(state.rows.computed[0]) >= 20:
            plan = StepPlanned(step=state.planned, preempted=(0,), admitted=() if len(state.rows) > 1 else ())
            plan = plan if len(state.rows) > 1 else schedule(state)
        else:
            plan = schedule(state)
        state = reduce(state, plan)
        said, steps = detector.event(plan, state), steps + 1
        commit = StepCommitted(step=plan.step, tokens=pack_tokens([1] * int(state.in_flight[0].samples.sum())))
        state = reduce(state, commit)
        assert detector.event(commit, state) == ""
    assert "livelock" in said


def test_a_hanging_step_is_noticed(tmp_path):
    log_dir = record(tmp_path / "log")
    path, clock = next(log_dir.iterdir()), count(0, 5)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    tail = Tail(log_dir)
    watcher = Watcher(tail.log)
    follow(tail, watcher, 30.0, False, lambda *_: True, now=lambda: float(next(clock)), sleep=lambda seconds: None)
    assert watcher.alarm.kind == "silent" and "for 30 s" in watcher.alarm.message and watcher.state.requests


# ---- no false alarm ----------------------------------------------------------------------------------------------


class Listener:
    """Hands every event to the detector, in frames as the engine writes them: each ends with its plan. Mutable."""

    def __init__(self) -> None:
        self.detector = StuckDetector()
        self.frame: list[AnyEvent] = []
        self.steps = 0

    def __call__(self, before: State, event: AnyEvent, after: State) -> bool:
        self.frame.append(event)
        said = self.detector.event(event, after)
        if isinstance(event, StepPlanned):
            self.steps += 1
            frame = Frame(first_event=0, events=tuple(self.frame), rank_digests=(), lost=0, digest=0, body=b"")
            said = said or self.detector.frame(frame, after)
            self.frame = []
        return bool(said)


def watched_course(seed: int) -> tuple[Listener, str]:
    """Who listened, and what went wrong, in a few thousand steps of a small engine of any configuration and any policy."""
    rng = Rng(seed)
    config = draw_config(rng.fork())
    first = start(EngineStarted(config=config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0))
    arrivals = tuple(
        arrival
        for client in draw_clients(rng.fork(), config, 60)
        if refusal(config, arrival := replace(arrival_of(0), prompt=pack_tokens(client.prompt), sampling=client.sampling)) is None
    )
    options = FutureOptions(steps=5_000, arrivals=arrivals, arrivals_per_mille=300, aborts_per_mille=20, resets_per_mille=5)
    listener = Listener()
    return listener, future_of(first, seed, options, listener).message


def test_no_false_alarm_in_many_steps():
    steps = seed = 0
    while steps < STEPS_WATCHED:
        listener, message = watched_course(seed)
        assert message == "", f"seed {seed}"
        steps, seed = steps + listener.steps, seed + 1
