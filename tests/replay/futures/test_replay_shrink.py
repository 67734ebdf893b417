"""vnext-replay shrink and to-test: a broken log becomes a few events, and those a pytest file of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from log_drive import record, small_config

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import simulate
from vnext.replay.cli.main import main
from vnext.replay.futures.redecided import (
    answers_of,
    checked_events,
    events_of,
    folded,
    recorded_events,
    recorded_voice,
    redecided,
    strange_places,
)
from vnext.replay.futures.revived import revived
from vnext.replay.futures.shrinking import write_log
from vnext.replay.futures.to_test import file_text, literal
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify
from vnext.state import events as event_types
from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling

GAVE_WAY = '''
def gave_way(before, event, after):
    return after.counters.preempted > before.counters.preempted
'''
MISSPELT = "def gave_way(before, event, after):\n    return after.no_such_thing\n"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Six hundred events of a healthy engine in which requests give way."""
    return record(tmp_path / "log", config=small_config(page_count=16), arrivals=120)


@pytest.fixture
def predicate(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(GAVE_WAY)
    return f"{tmp_path / 'own.py'}:gave_way"


def broken_log(tmp_path: Path) -> Path:
    """A legal life, then a plan with one token too many: the reducer refuses it."""
    events = list(events_of(open_log(record(tmp_path / "life", arrivals=20))))
    place = next(n for n, event in enumerate(events) if isinstance(event, StepPlanned) and event.step > 30 and event.admitted)
    where, tokens = events[place].admitted[0]
    events[place] = StepPlanned(step=events[place].step, admitted=((where, tokens + 50),))
    write_log(events[: place + 1], tmp_path / "broken")
    return tmp_path / "broken"


# ---- shrink ------------------------------------------------------------------------------------------------------


def test_a_healthy_log_has_nothing_to_shrink(log_dir, tmp_path, capsys):
    assert main(["shrink", str(log_dir), "-o", str(tmp_path / "small"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "" and answer["events_before"] > 400 and not (tmp_path / "small").exists()
    assert main(["shrink", str(log_dir)]) == 0
    assert "keep every law" in capsys.readouterr().out


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_predicate_is_made_small(tmp_path, predicate, capsys, privacy):
    """The smallest story in which a request gives way is a legal log of a handful of events."""
    log_dir = record(tmp_path / "log", privacy, small_config(page_count=16), arrivals=120)
    arguments = ["shrink", str(log_dir), "--predicate", predicate]
    assert main([*arguments, "-o", str(tmp_path / "small"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["events"] <= 12 < answer["events_before"] and len(answer["lines"]) == answer["events"]
    small = open_log(tmp_path / "small")
    verdict = verify(small, all_laws=True)
    assert verdict.same and verdict.events == answer["events"] - 1
    assert "give way" in answer["lines"][-1]
    assert main([*arguments, "-o", str(tmp_path / "one.vnextlog")]) == 1
    assert events_of(open_log(tmp_path / "one.vnextlog")) == events_of(small)


def test_an_event_that_nobody_decides_stays_where_it_is(tmp_path, capsys):
    """No story can be told again in which something happens that may not happen: the log is told as it is."""
    log_dir = broken_log(tmp_path)
    assert main(["shrink", str(log_dir), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"].startswith("IllegalEvent") and answer["events"] == answer["events_before"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--predicate", "nowhere.py:gave_way"], "there is no predicate"), (["--predicate", "gave_way"], "there is no predicate"),
        (["--predicate", "{file}:gave_weigh"], "has no function"), (["--predicate", "{wrong}:gave_way"], "no_such_thing"),
        (["--law", "M1"], "does not break M1 first"),
    ],
)  # fmt: skip
def test_bad_inputs_are_one_sentence(tmp_path, predicate, capsys, options, words):
    (tmp_path / "wrong.py").write_text(MISSPELT)
    options = [each.format(file=tmp_path / "own.py", wrong=tmp_path / "wrong.py") for each in options]
    assert main(["shrink", str(broken_log(tmp_path)), *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("seed", [0, 2, 3])  # whose rings hold a preemption, whatever a segment's head takes of them
@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_ring_is_shrunk_from_where_it_begins(tmp_path, predicate, capsys, privacy, seed):
    """What lives there comes anew with its tokens so far, and goes on as it did: the same failure, in a whole log."""
    ring = record(tmp_path / "ring", privacy, small_config(page_count=16), seed, arrivals=140, size=2000, max_bytes=8000)
    log = open_log(ring)
    lived = len(first_state(log).requests)
    assert log.header.index > 0 and lived
    story = events_of(log)
    came = [sum(isinstance(event, RequestArrived) for event in events) for events in (story, tuple(recorded_events(log)))]
    assert came[0] == came[1] + lived
    told, ended = answers_of(story), ended_answers(log)
    assert all(tokens[: len(told[name])] == told[name] for name, tokens in ended.items())
    assert sum(told[name] != tokens for name, tokens in ended.items()) <= 1, "the story may end before the last request does"
    assert main(["shrink", str(ring), "--predicate", predicate, "-o", str(tmp_path / "small"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["events"] <= 12 and answer["revived"] == lived
    assert verify(open_log(tmp_path / "small"), all_laws=True).same
    assert main(["shrink", str(ring)]) == 0
    text = capsys.readouterr().out
    assert "keep every law" in text and "that lived there come anew, their tokens so far as prompts" in text
    assert main(["to-test", str(tmp_path / "small"), "--predicate", predicate, "-o", str(tmp_path / "test_ring.py")]) == 0


def ended_answers(log) -> dict[str, list[int]]:
    """What each request was told that ended in the log, from its snapshot on: the last token before it first, if it ran."""
    answers: dict[str, list[int]] = {str(life.arrival.id): unpack_tokens(life.last).tolist() for life in revived(first_state(log))}
    ended = {}
    for before, event, after in folded(first_state(log), tuple(recorded_events(log))):
        for news in outputs(before, event, after) if isinstance(event, StepCommitted) else ():
            answers.setdefault(str(news.id), []).append(news.token)
            if news.finish:
                ended[str(news.id)] = answers[str(news.id)]
    return ended


def test_a_failure_that_a_ring_has_lost_the_cause_of_is_said(tmp_path, capsys):
    """It holds of the log's own numbers, which no story told anew has."""
    ring = record(tmp_path / "ring", config=small_config(page_count=16), arrivals=120, size=1500, max_bytes=8000)
    late = open_log(ring).header.first_event + 20
    (tmp_path / "late.py").write_text(f"def late(before, event, after):\n    return after.sequence == {10 * late}\n")
    assert main(["shrink", str(ring), "--predicate", f"{tmp_path / 'late.py'}:late"]) == 0
    (tmp_path / "own.py").write_text(
        f"def own(before, event, after):\n    return before.sequence == {late} and before.committed > 40\n"
    )
    code = main(["shrink", str(ring), "--predicate", f"{tmp_path / 'own.py'}:own"])
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_what_is_there_is_not_written_over(log_dir, predicate, capsys):
    assert main(["shrink", str(log_dir), "--predicate", predicate, "-o", str(log_dir)]) == 2
    assert "is there already" in capsys.readouterr().err


# ---- stories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_story_told_again_is_the_same_story(tmp_path, privacy):
    """The recorded answers are a voice that says what was said; what nobody was told does not matter."""
    config = small_config(pipeline_depth=1, page_count=60)
    events = events_of(open_log(record(tmp_path / "log", privacy, config, seed=5)))
    again = redecided(events, recorded_voice(events[0].config, answers_of(events)), strange_places(events))
    assert len(again) == len(events) > 100 and answers_of(again) == answers_of(events)
    assert all(one == other for one, other in zip(again, events) if not isinstance(one, StepCommitted))


def test_a_toy_that_speaks_otherwise_is_no_failure_of_the_engine(log_dir):
    """Only where the laws see nothing the simulator's model is asked, and its own logs keep its word."""
    assert checked_events(simulate(scenario(3, client_count=20)).events) == (None, False)


# ---- to-test -----------------------------------------------------------------------------------------------------


def evaluated(text: str) -> object:
    names = {name: getattr(event_types, name) for name in dir(event_types) if name[0].isupper()}
    return eval(text, {**names, "Sampling": Sampling, "SchedulerConfig": SchedulerConfig, "pack_tokens": pack_tokens})


def test_literals_are_the_events(log_dir):
    events = events_of(open_log(log_dir))
    assert [evaluated(literal(event)) for event in events] == list(events)
    arrival = next(event for event in events if isinstance(event, RequestArrived))
    assert f"pack_tokens({unpack_tokens(arrival.prompt).tolist()})" in literal(arrival) and "temperature" not in literal(arrival)
    odd = StepCommitted(step=0, tokens=b"\x01")
    assert evaluated(literal(odd)) == odd


def test_a_predicate_goes_into_the_file(tmp_path, log_dir, predicate, capsys):
    """A file by itself: pytest runs it in a process of its own, and it fails for what the predicate says."""
    assert main(["shrink", str(log_dir), "--predicate", predicate, "-o", str(tmp_path / "small")]) == 1
    out = tmp_path / "test_story.py"
    assert main(["to-test", str(tmp_path / "small"), "-o", str(out), "--predicate", predicate]) == 0
    assert "it fails today" in capsys.readouterr().out
    text = out.read_text()
    assert "def gave_way(before, event, after):" in text and "rows [" in text
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(out)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and "the predicate holds after event" in done.stdout, done.stdout
    out.write_text(text.replace("counters.preempted > before", "counters.preempted < before"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_story_that_is_right_gives_a_test_that_passes(tmp_path, capsys):
    log_dir = record(tmp_path / "log", arrivals=5)
    out = tmp_path / "test_story.py"
    assert main(["to-test", str(log_dir), "-o", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == ""
    text, found = file_text(events_of(open_log(log_dir)))
    assert found is None and text == out.read_text() and "def test_every_law_is_kept() -> None:" in text
    module: dict = {}
    exec(text, module)
    module["test_every_law_is_kept"]()
    assert main(["to-test", str(log_dir), "-o", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_story_with_constraints_is_a_file_that_runs() -> None:
    """The file imports what its arrivals consist of, and no more."""
    for seed, constrained in ((2, True), (0, False)):
        text, found = file_text(simulate(scenario(seed, 5)).events)
        assert found is None and ("import Constraint, Sampling" in text) == ("constraint=Constraint(" in text) == constrained
        module: dict = {}
        exec(text, module)
        module["test_every_law_is_kept"]()


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_ring_becomes_a_test_from_where_it_begins(tmp_path, capsys, privacy):
    """What lives at its snapshot arrives in the file's story, so that the file needs neither the ring nor its beginning."""
    ring = record(tmp_path / "ring", privacy, small_config(page_count=16), arrivals=60, size=600, max_bytes=2400)
    log, out = open_log(ring), tmp_path / "test_story.py"
    lived = first_state(log).rows.id.tolist()
    assert log.header.index > 0 and lived
    assert main(["to-test", str(ring), "-o", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == ""
    text, module = out.read_text(), {}
    exec(text, module)
    module["test_every_law_is_kept"]()
    assert all(f"name='{id_}'" in text or f'name="{id_}"' in text for id_ in lived), "all that ran"


def test_a_long_log_is_no_story(log_dir, tmp_path, capsys):
    assert main(["to-test", str(log_dir), "-o", str(tmp_path / "test_x.py")]) == 2
    assert "`vnext-replay shrink` makes" in capsys.readouterr().err
