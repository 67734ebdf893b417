"""Commands on logs whose engine paused and changed its weights, with texts and without."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from log_answers import PRIVACY, answer, events_of, logs_by_privacy

from vnext.replay.answers.watch import StuckDetector
from vnext.replay.cli.main import main
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.futures.recording import recorded
from vnext.replay.futures.what_if_run import retrace
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.state.events import EnginePaused, PrefixCacheReset, WeightsChanged
from vnext.state.traits import everyone_leaves, line_of


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Path]:
    return logs_by_privacy(tmp_path_factory, changing=0.06)


def changes_of(log_dir: Path) -> list[WeightsChanged]:
    return [event for event in events_of(log_dir) if isinstance(event, WeightsChanged)]


@PRIVACY
def test_it_verifies_under_all_laws(logs, capsys, privacy):
    code, found = answer(capsys, "verify", logs[privacy], "--laws")
    assert (code, found["same"], found["difference"], found["decisions_differ"]) == (0, True, None, 0)
    assert found["keyframes"] > 1 and len(changes_of(logs[privacy])) > 4
    assert any(isinstance(event, EnginePaused) and event.mode == "sleep" for event in events_of(logs[privacy]))


def test_a_redacted_log_keeps_the_digest_and_not_the_path(logs):
    assert {event.path for event in changes_of(logs["full"])} == {"/secret/path"}
    assert {event.path for event in changes_of(logs["shape"])} == {""}
    assert changes_of(logs["shape"])[-1].digest == changes_of(logs["full"])[-1].digest
    assert all(b"secret/path" not in path.read_bytes() for path in open_log(logs["shape"]).paths)


@PRIVACY
def test_info_names_the_last_version(logs, capsys, privacy):
    last = changes_of(logs[privacy])[-1]
    _, found = answer(capsys, "info", logs[privacy])
    assert found["weights"] == f"version {last.version} (digest {last.version})"
    assert main(["info", str(logs[privacy])]) == 0
    assert f"changed, at last to version {last.version}" in " ".join(capsys.readouterr().out.split())


@PRIVACY
def test_a_request_says_why_it_computed_its_tokens_again(logs, capsys, privacy):
    items = [item for item in fold(open_log(logs[privacy])) if isinstance(item, Folded)]
    change = next(item for item in items if isinstance(item.event, WeightsChanged) and len(item.before.rows))
    id_ = int(change.before.rows.id[0])
    _, found = answer(capsys, "req", logs[privacy], id_)
    notes = [moment["note"] for moment in found["moments"] if moment["event"] == change.number]
    assert notes == [f"{line_of(change.event)}: its tokens are computed anew"]


@PRIVACY
def test_the_timeline_shows_pauses_and_versions(logs, capsys, privacy, tmp_path):
    assert main(["trace", str(logs[privacy]), "-o", str(tmp_path / "out.json")]) == 0
    names = Counter(event.get("name") for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    assert {"paused (wait)", "resumed", "weights, version 1 (digest 1)"} <= names.keys()
    items = [item for item in fold(open_log(logs[privacy])) if isinstance(item, Folded)]
    for item in items:
        if everyone_leaves(item.event) and len(item.before.rows):
            assert names[f"waits again: {line_of(item.event)}"] > 0


@PRIVACY
def test_a_pause_is_no_standstill(logs, privacy):
    detector, state = StuckDetector(), None
    for item in fold(open_log(logs[privacy])):
        if isinstance(item, Folded):
            assert detector.event(item.event, item.after) == ""
            state = item.after
    assert state is not None


def test_steps_know_their_weights(logs):
    """What runs the model again takes the version of each step from here."""
    walk, versions = Walk(logs["full"], Selection()), set()
    walk.begin(10**6, str)
    for step in walk.steps():
        versions.add(step.state.weights.version if step.state.weights else 0)
    assert walk.end == "complete" and versions == {0, *(change.version for change in changes_of(logs["full"]))}


def test_what_if_forgets_the_cache_where_the_weights_changed(logs):
    taken = recorded(open_log(logs["whole"]))
    resets = [each for each in taken.outside if isinstance(each.event, PrefixCacheReset)]
    changes = len(changes_of(logs["whole"])) + sum(
        isinstance(event, EnginePaused) and event.mode == "sleep" or isinstance(event, PrefixCacheReset)
        for event in events_of(logs["whole"])
    )
    assert len(resets) == changes
    again = retrace(taken, open_log(logs["whole"]).header.started)
    assert again.events == taken.events


@pytest.mark.parametrize(
    "arguments",
    [["what-if"], ["stat"], ["diff"], ["cache"], ["convert", "--to", "jsonl"]],
)
def test_other_commands_read_it(logs, capsys, tmp_path, arguments):
    more = [str(logs["whole"])] if arguments[0] == "diff" else ["-o", str(tmp_path / "out")] if arguments[0] == "convert" else []
    code = main([arguments[0], str(logs["whole"]), *more, *arguments[1:]])
    assert code == 0, capsys.readouterr()


def test_futures_of_a_paused_engine_go_on(logs, capsys):
    items = [item for item in fold(open_log(logs["whole"])) if isinstance(item, Folded)]
    paused = next(item for item in items if item.before.paused and item.before.requests and item.before.in_flight)
    code, found = answer(capsys, "fork", logs["whole"], paused.before.planned, "--forks", "4")
    assert code == 0, found
