"""vnext-replay shrink and to-test: a broken log becomes a few events, and those a pytest file of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from log_drive import record, small_config

from vnext.replay.cli import main
from vnext.replay.retold import answers_of, events_of, judged, recorded_voice, retold, strange_places
from vnext.replay.shrinking import shrink_log, write_log
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.to_test import file_text, literal
from vnext.replay.verify import verify
from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.simulator import simulate
from vnext.state import events as event_types
from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.params import Sampling

GAVE_WAY = '''
def gave_way(before, event, after):
    return after.counters.preempted > before.counters.preempted
'''
MISSPELT = "def gave_way(before, event, after):\n    return after.no_such_thing\n"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Six hundred events of a healthy engine in which requests give way."""
    return record(tmp_path / "log", config=small_config(block_count=16), arrivals=120)


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
    log_dir = record(tmp_path / "log", privacy, small_config(block_count=16), arrivals=120)
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


def test_a_log_without_its_beginning_tells_no_story(tmp_path):
    log_dir = record(tmp_path / "log", size=2000)
    later = sorted(log_dir.iterdir())[1]
    with pytest.raises(UnusableLog, match="needs the engine's start"):
        shrink_log(open_log(later))


def test_what_is_there_is_not_written_over(log_dir, predicate, capsys):
    assert main(["shrink", str(log_dir), "--predicate", predicate, "-o", str(log_dir)]) == 2
    assert "is there already" in capsys.readouterr().err


# ---- stories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_story_told_again_is_the_same_story(tmp_path, privacy):
    """The recorded answers are a voice that says what was said; what nobody was told does not matter."""
    config = small_config(pipeline_depth=1, block_count=60)
    events = events_of(open_log(record(tmp_path / "log", privacy, config, seed=5)))
    again = retold(events, recorded_voice(events[0].config, answers_of(events)), strange_places(events))
    assert len(again) == len(events) > 100 and answers_of(again) == answers_of(events)
    assert all(one == other for one, other in zip(again, events) if not isinstance(one, StepCommitted))


def test_a_toy_that_speaks_otherwise_is_no_failure_of_the_engine(log_dir):
    """Only where the laws see nothing the simulator's model is asked, and its own logs keep its word."""
    assert judged(simulate(scenario(3)).events) == (None, False)


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
    root = Path(__file__).resolve().parents[2]
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


def test_a_long_log_is_no_story(log_dir, tmp_path, capsys):
    assert main(["to-test", str(log_dir), "-o", str(tmp_path / "test_x.py")]) == 2
    assert "`vnext-replay shrink` makes" in capsys.readouterr().err
