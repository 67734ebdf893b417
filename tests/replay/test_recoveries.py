"""Every command on logs whose ranks were replaced and that continue another engine's log, with texts and without."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import xxhash
from log_answers import PRIVACY, answer, events_of, logs_by_privacy
from log_drive import engine, record, small_config, started
from msgspec.structs import replace

from vnext.log.codec import Frame
from vnext.replay.answers.convert import arrivals_of
from vnext.replay.answers.watch import IDLE_FRAMES, StuckDetector
from vnext.replay.cli.main import main
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.futures.recording import recorded
from vnext.replay.futures.to_test import literal
from vnext.replay.futures.what_if_run import retrace
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state import events as all_events
from vnext.state.digest import digest
from vnext.state.events import (
    EngineRecovered,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.traits import line_of

RESUMED = 5


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    return logs_by_privacy(tmp_path_factory, recovering=0.03, resumed=RESUMED)


def folded(log_dir: Path) -> list[Folded]:
    return [item for item in fold(open_log(log_dir)) if isinstance(item, Folded)]


def lost_steps(items: list[Folded]) -> list[int]:
    return [each.step for item in items if isinstance(item.event, EngineRecovered) for each in item.before.in_flight]


def survivor(items: list[Folded]) -> int:
    """A request that ran at a recovery, had tokens by then and got more, and was not resumed."""
    tokens = Counter()
    ran: set[int] = set()
    for item in items:
        for output in outputs(item.before, item.event, item.after):
            tokens[output.id] += output.token >= 0
            if output.id in ran and output.finish in ("stop", "length"):
                return output.id
        if isinstance(item.event, EngineRecovered):
            ran |= {id_ for id_ in item.before.rows.id.tolist() if id_ >= RESUMED and tokens[id_]}
    raise AssertionError("nobody survived a recovery in this log: choose another seed")


@PRIVACY
def test_it_verifies_under_all_laws(logs, capsys, privacy):
    code, found = answer(capsys, "verify", logs[privacy], "--laws")
    assert (code, found["same"], found["difference"], found["decisions_differ"]) == (0, True, None, 0)
    assert found["keyframes"] > 1 and found["rank_digests"] > 20
    assert len(lost_steps(folded(logs[privacy]))) > 2, "steps were in flight when ranks died"


@PRIVACY
def test_info_names_the_log_before_and_the_recoveries(logs, capsys, privacy):
    _, found = answer(capsys, "info", logs[privacy])
    events = events_of(logs[privacy])
    resumed = [event for event in events if isinstance(event, RequestResumed)]
    assert found["continues"] == {
        "log": "/logs/before" if privacy == "full" else "before", "frames": 77, "requests": RESUMED,
        "cause": "the engine core was killed (signal 9)", "tokens": sum(len(event.generated) // 4 for event in resumed),
    }  # fmt: skip
    recoveries = [number for number, event in enumerate(events, 1) if isinstance(event, EngineRecovered)][1:]
    assert found["recoveries"] == len(recoveries) > 2
    assert [each["event"] for each in found["last_recoveries"]] == recoveries[-16:]
    assert found["requests"] == sum(isinstance(event, RequestArrived) for event in events)
    assert main(["info", str(logs[privacy])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "before after frame 77, because the engine core was killed (signal 9); 5 requests came back" in shown
    assert f"its ranks were replaced {len(recoveries)} times, last at event {recoveries[-1]:,}: rank 1 was killed" in shown


@PRIVACY
def test_a_request_has_one_life_across_a_recovery(logs, capsys, privacy):
    items = folded(logs[privacy])
    id_ = survivor(items)
    _, found = answer(capsys, "req", logs[privacy], id_)
    kinds = [moment["kind"] for moment in found["moments"]]
    assert found["recoveries"] == kinds.count("recovered") > 0 and found["resumed_tokens"] == 0
    assert kinds[0] == "arrived" and kinds[-1] == "ended" and kinds.count("admitted") > found["recoveries"]
    sampled = [int(moment["note"].removeprefix("token ")) for moment in found["moments"] if moment["kind"] == "sampled"]
    told = [output.token for item in items for output in outputs(item.before, item.event, item.after) if output.id == id_]
    assert sampled == told
    lost = next(moment for moment in found["moments"] if moment["kind"] == "recovered" and moment["tokens"])
    assert lost["note"] == "rank 1 was killed (signal 9)"
    assert main(["req", str(logs[privacy]), str(id_)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its ranks are replaced" in shown and "the ranks were replaced" in shown


def test_its_answer_is_what_it_would_have_been(logs):
    """The engine of these logs answers with a hash of a request's tokens, so each token must be that of all before it."""
    items = folded(logs["full"])
    checked = 0
    histories: dict[int, bytes] = {}
    for item in items:
        if isinstance(item.event, RequestArrived):
            histories[item.event.id] = item.event.prompt + (item.event.generated if isinstance(item.event, RequestResumed) else b"")
        for output in outputs(item.before, item.event, item.after):
            if output.token >= 0:
                assert output.token == xxhash.xxh3_64_intdigest(histories[output.id]) % 6
                histories[output.id] += output.token.to_bytes(4, "little")
                checked += 1
    assert checked > 100


@PRIVACY
def test_a_resumed_request_says_whose_tokens_it_brought(logs, capsys, privacy):
    event = next(event for event in events_of(logs[privacy]) if isinstance(event, RequestResumed) and event.generated)
    _, found = answer(capsys, "req", logs[privacy], event.id)
    assert found["resumed_tokens"] == len(event.generated) // 4 and found["continues"].endswith("before")
    assert f"back from another engine with {found['resumed_tokens']} tokens" in found["moments"][0]["note"]
    assert main(["req", str(logs[privacy]), str(event.id)]) == 0
    assert "of another engine, whose log is" in " ".join(capsys.readouterr().out.split())


@PRIVACY
def test_times_are_counted_once_and_across_segments(logs, tmp_path, capsys, privacy):
    """Lost steps have no time; a wait across a recovery is one wait; what a segment's end cuts is joined again."""
    more = dict(arrivals=60, timestamped=False, recovering=0.03, resumed=RESUMED)
    parts = answer(capsys, "slow", record(tmp_path / "parts", privacy, size=3000, **more), "--top", "1000")[1]
    whole = answer(capsys, "slow", record(tmp_path / "whole", privacy, **more), "--top", "1000")[1]
    for kind in ("firsts", "gaps", "steps"):  # equal times come in another order
        assert sorted(map(json.dumps, parts[kind])) == sorted(map(json.dumps, whole[kind])), kind
    items = folded(tmp_path / "whole")
    lost, steps = set(lost_steps(items)), {each["step"] for each in whole["steps"]}
    assert lost and not lost & steps and lost & {item.event.step for item in items if isinstance(item.event, StepPlanned)}
    resumed = {item.event.id for item in items if isinstance(item.event, RequestResumed) and item.event.generated}
    assert not resumed & {each["id"] for each in whole["firsts"]}, "their first tokens came from another engine"
    assert any(each["preempted"] for each in whole["gaps"])
    code, counts = answer(capsys, "stat", logs[privacy])
    assert code == 0 and counts["steps"] == len([item for item in items if isinstance(item.event, StepPlanned)])


@PRIVACY
def test_trace_draws_recoveries_and_no_lost_step(logs, tmp_path, capsys, privacy):
    assert answer(capsys, "trace", logs[privacy], "-o", tmp_path / "trace.json")[0] == 0
    drawn = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    instants = Counter(each["name"].partition(":")[0] for each in drawn if each["ph"] == "i")
    events = events_of(logs[privacy])
    assert instants["recovery"] == sum(isinstance(event, EngineRecovered) for event in events)
    assert instants["its ranks are gone"] > 3
    steps = [int(each["name"].split()[1]) for each in drawn if each["ph"] == "X" and each["pid"] == 1]
    assert steps == [event.step for event in events if isinstance(event, StepCommitted)]


@PRIVACY
def test_what_if_reproduces_it_event_by_event(logs, capsys, privacy):
    log = open_log(logs[privacy])
    ran = retrace(recorded(log), log.header.started)
    assert ran.events == events_of(logs[privacy])
    assert answer(capsys, "what-if", logs[privacy], "--set", "max_num_seqs=3")[0] == 0


@PRIVACY
def test_watch_raises_no_alarm(logs, capsys, privacy):
    code, found = answer(capsys, "watch", logs[privacy], "--once", "--whole", "--laws")
    assert code == 0 and found["alarm"] is None and found["steps"] > 100


def test_ranks_that_start_are_not_stuck(logs):
    """Frames without a plan are idle where the engine serves, and not while it waits for new ranks."""
    item = next(item for item in folded(logs["full"]) if isinstance(item.event, EngineRecovered) and item.after.waiting)
    frame = Frame(first_event=item.number, events=(item.event,), rank_digests=(), lost=0, digest=0, body=b"")
    detector = StuckDetector()
    assert detector.event(item.event, item.after) == ""
    assert not any(detector.frame(frame, item.after) for _ in range(2 * IDLE_FRAMES))
    assert any(StuckDetector().frame(frame, item.after) for _ in range(1)) is False
    served = StuckDetector()
    assert [served.frame(frame, item.after) != "" for _ in range(IDLE_FRAMES)][-1], "the same frames without a recovery"


@PRIVACY
def test_cache_counts_no_token_twice(logs, capsys, privacy):
    code, found = answer(capsys, "cache", logs[privacy])
    assert code == 0 and found["asked"] == sum(found[name] for name in ("found", "absent", "salted", "new"))
    assert min(found[name] for name in ("found", "absent", "salted", "new")) >= 0 and found["found"] > 0


@PRIVACY
def test_futures_of_its_states_keep_every_law(logs, capsys, privacy):
    code, found = answer(capsys, "fork", logs[privacy], 60, "--points", 4, "--forks", 6, "--steps", 40)
    assert code == 0 and found["failed"] == 0 and found["steps"] > 100


WRONG = '''
def wrong(before, event, after):
    return type(event).__name__ == "EngineRecovered" and not event.log and len(before.rows) > 1
'''


def test_a_failure_behind_a_recovery_becomes_a_small_test(logs, tmp_path, capsys):
    """shrink keeps the recovery that the predicate needs; to-test writes what came back as literals that fail alike."""
    (tmp_path / "wrong.py").write_text(WRONG)
    predicate = f"{tmp_path / 'wrong.py'}:wrong"
    code, found = answer(capsys, "shrink", logs["whole"], "--predicate", predicate, "-o", tmp_path / "small")
    assert code == 1 and found["events"] < 12, found
    assert sum(isinstance(event, EngineRecovered) for event in events_of(tmp_path / "small")) == 1
    code, written = answer(capsys, "to-test", tmp_path / "small", "--predicate", predicate, "-o", tmp_path / "test_it.py")
    assert code == 0 and written["kind"] == "predicate"
    module: dict = {}
    exec(compile((tmp_path / "test_it.py").read_text(), "test_it.py", "exec"), module)
    with pytest.raises(AssertionError, match="the predicate holds"):
        next(value for name, value in module.items() if name.startswith("test_"))()


def test_a_story_that_continues_another_log_is_a_test_too(tmp_path, capsys):
    log_dir = record(tmp_path / "log", arrivals=3, recovering=0.05, resumed=4)
    code, _ = answer(capsys, "to-test", log_dir, "-o", tmp_path / "test_it.py")
    text = (tmp_path / "test_it.py").read_text()
    assert code == 1 and "RequestResumed(" in text and "EngineRecovered(" in text
    module: dict = {}
    exec(compile(text, "test_it.py", "exec"), module)
    next(value for name, value in module.items() if name.startswith("test_"))()
    assert module["EVENTS"][2].generated == events_of(log_dir)[1].generated


def test_a_resumed_request_as_a_literal_is_itself(logs):
    names = vars(all_events) | {"Sampling": Sampling}
    for event in events_of(logs["full"])[:RESUMED]:
        assert eval(literal(event), dict(names)) == event


@PRIVACY
def test_slices_of_it_merge_to_the_same_bytes(tmp_path, capsys, privacy):
    log_dir = record(tmp_path / "log", privacy, arrivals=40, recovering=0.04, resumed=RESUMED)
    events = events_of(log_dir)
    place = [number for number, event in enumerate(events) if isinstance(event, EngineRecovered)][2]
    behind = next(event.step for event in events[place:] if isinstance(event, StepPlanned))
    for at in (behind, behind - 1):
        parts = tmp_path / f"one {at}", tmp_path / f"two {at}"
        assert answer(capsys, "cut", log_dir, 0, at, "-o", parts[0])[0] == 0
        assert answer(capsys, "cut", log_dir, at, "-o", parts[1])[0] == 0
        assert answer(capsys, "merge", *parts, "-o", tmp_path / f"all {at}")[0] == 0
        assert answer(capsys, "verify", parts[1], "--laws")[0] == 0
        assert answer(capsys, "diff", tmp_path / f"all {at}", log_dir)[0] == 0
        assert events_of(tmp_path / f"all {at}") == events


def test_its_texts_can_be_removed(logs, tmp_path, capsys):
    for name in ("whole", "full"):
        code, found = answer(capsys, "redact", logs[name], "-o", tmp_path / name)
        assert code == 0 and answer(capsys, "verify", tmp_path / name, "--laws")[0] == 0
    pairs = zip(events_of(logs["whole"]), events_of(tmp_path / "whole"), strict=True)
    resumed = [pair for pair in pairs if isinstance(pair[0], RequestResumed) and pair[0].generated]
    assert resumed
    for event, shape in resumed:
        assert len(event.generated) == len(shape.generated) and len(event.prompt) == len(shape.prompt)
        assert not set(unpack_tokens(event.generated).tolist()) & set(unpack_tokens(shape.generated).tolist())


def test_its_requests_convert_and_come_back(logs, tmp_path, capsys):
    for form in ("jsonl", "mooncake", "vllm-vcr"):
        assert answer(capsys, "convert", logs["whole"], "--to", form, "-o", tmp_path / form)[0] == 0
    (tmp_path / "jsonl").rename(tmp_path / "requests.jsonl")
    assert answer(capsys, "convert", tmp_path / "requests.jsonl", "--like", logs["whole"], "-o", tmp_path / "back")[0] == 0
    assert list(arrivals_of(open_log(tmp_path / "back"))) == list(arrivals_of(open_log(logs["whole"])))
    lines = [json.loads(line) for line in (tmp_path / "mooncake").read_text().splitlines()]
    items = folded(logs["whole"])
    tokens = Counter(output.id for item in items for output in outputs(item.before, item.event, item.after) if output.token >= 0)
    first = next(item.event for item in items if isinstance(item.event, RequestResumed) and item.event.generated)
    finished = any(o.id == first.id and o.finish for item in items for o in outputs(item.before, item.event, item.after))
    assert finished and lines[first.id]["output_length"] == len(first.generated) // 4 + tokens[first.id]


def test_the_walk_of_exec_begins_anew_at_recoveries(logs):
    """Lost steps are uncommitted; what a resumed request brought counts as its own tokens."""
    walk = Walk(logs["whole"], Selection(), telling=True)
    walk.begin(10**6, str)
    steps = [step.step for step in walk.steps()]
    items = folded(logs["whole"])
    assert walk.uncommitted == len(lost_steps(items)) and not set(steps) & set(lost_steps(items))
    assert walk.recoveries == sum(isinstance(item.event, EngineRecovered) for item in items)
    for event in (item.event for item in items if isinstance(item.event, RequestResumed)):
        told = walk.reported[event.id]
        assert told.first == (len(event.prompt) + len(event.generated)) // 4
        assert told.tokens[: told.first] == unpack_tokens(event.prompt + event.generated).tolist()


@PRIVACY
def test_show_and_ranks_and_the_page_know_it(logs, capsys, privacy):
    assert answer(capsys, "ranks", logs[privacy])[0] == 0
    items = folded(logs[privacy])
    cautious = next(item for item in items if isinstance(item.event, StepPlanned) and item.after.cautious)
    _, found = answer(capsys, "show", logs[privacy], cautious.event.step)
    assert found["state"]["cautious"] == cautious.after.cautious
    assert line_of(items[0].event).startswith("recovery: ") and " comes back with " in line_of(items[1].event)


def test_two_logs_that_recover_differently_differ_there(logs, tmp_path, capsys):
    def change(events, digest, ranks):
        more = [replace(event, cause="rank 0 was killed") if isinstance(event, EngineRecovered) else event for event in events]
        return more, digest, ranks

    more = dict(arrivals=60, timestamped=True, recovering=0.03, resumed=RESUMED)
    other = record(tmp_path / "other", change=change, **more)
    code, found = answer(capsys, "diff", logs["whole"], other)
    assert code == 1 and [field["name"] for field in found["fields"]] == ["cause"] and found["event"] == 1


def after(item: Folded) -> State:
    return item.after


# ---- the log before ----------------------------------------------------------------------------------------------


def two_lives(folder: Path, lost: int = 1, change=lambda events: events) -> tuple[Path, Path]:
    """A log whose engine dies in the middle, and that of its successor, to which each client says all but `lost` of its tokens."""
    config = small_config(eos_token_ids=(), max_num_seqs=20, page_count=200)
    before, after = (Recorder.open(folder / name, started(config), "full", Bounds()) for name in ("before", "after"))
    state, tokens, arrivals = start(started(config)), {}, {}
    for events, befores, state, ranks in islice(engine(config, 3, 12), 30):
        before.append(events, befores, digest(state), ranks)
        arrivals |= {event.id: event for event in events if isinstance(event, RequestArrived)}
        for place, event in enumerate(events):
            for output in outputs(befores[place], event, [*befores, state][place + 1]):
                tokens.setdefault(output.id, []).append(output.token)
    before.close()
    live = sorted(state.requests.mapping())
    more: list = [EngineRecovered(cause="the engine core was killed", log="/elsewhere/before", frames=30)]
    for id_ in live:
        told = tokens.get(id_, [])[: -lost or None]
        fields = {name: getattr(arrivals[id_], name) for name in RequestArrived.__struct_fields__} | {"id": len(more) - 1}
        more.append(RequestResumed(**fields | {"generated": pack_tokens(told)}))
    events = change(more)
    befores, state = [], start(started(config))
    for event in events:
        befores.append(state)
        state = reduce(state, event)
    after.append(events, befores, digest(state), ())
    after.close()
    assert sum(bool(event.generated) for event in more[1:]) > 1
    return folder / "before", folder / "after"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_requests_that_came_back_are_held_to_the_log_before(tmp_path, capsys, lost):
    before, after_ = two_lives(tmp_path, lost)
    code, found = answer(capsys, "verify", after_, "--before")
    resumed = [event for event in events_of(after_) if isinstance(event, RequestResumed)]
    assert code == 0 and found["same"] and found["continued"] == {
        "log": str(before), "requests": len(resumed), "tokens": sum(len(event.generated) // 4 for event in resumed),
        "unlogged": 0, "difference": "",
    }  # fmt: skip
    assert main(["verify", "--before", str(after_)]) == 0
    assert "all of which it gave them" in " ".join(capsys.readouterr().out.split())


def other_token(events: list) -> list:
    place = next(place for place, event in enumerate(events) if place and event.generated)
    tokens = unpack_tokens(events[place].generated).tolist()
    return [*events[:place], replace(events[place], generated=pack_tokens([*tokens[:-1], (tokens[-1] + 1) % 6])), *events[place + 1 :]]


def other_name(events: list) -> list:
    place = next(place for place, event in enumerate(events) if place and event.generated)
    return [*events[:place], replace(events[place], name="stranger"), *events[place + 1 :]]


def other_prompt(events: list) -> list:
    return [events[0], replace(events[1], prompt=events[1].prompt + pack_tokens([3])), *events[2:]]


@pytest.mark.parametrize(
    ("change", "why"),
    [(other_token, "that the older log did not give it"), (other_name, "does not know it"), (other_prompt, "another prompt")],
)
def test_what_the_log_before_does_not_hold_is_named(tmp_path, capsys, change, why):
    _, after_ = two_lives(tmp_path, change=change)
    code, found = answer(capsys, "verify", after_, "--before")
    assert code == 1 and not found["same"] and why in found["continued"]["difference"] and found["difference"] is None
    assert main(["verify", "--before", str(after_)]) == 1
    assert "does not go on where the older one ended" in " ".join(capsys.readouterr().out.split())


def test_without_a_log_before_there_is_one_sentence(logs, tmp_path, capsys):
    def sentence(log_dir: Path) -> str:
        assert main(["verify", "--before", str(log_dir)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    before, after_ = two_lives(tmp_path)
    assert "continues no other log" in sentence(before)
    assert "continues /logs/before, which is not there" in sentence(logs["full"])
    assert answer(capsys, "redact", after_, "-o", tmp_path / "shape")[0] == 0
    assert "a log without texts has a hash of them" in sentence(tmp_path / "shape")
