"""The record of kill_under_load.py --survive holds what was found so far, and can be added to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from serving import ROOT

from vnext.replay.reading.source import UnusableLog


def test_a_record_is_written_at_each_kill_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from kills_record import Recording
    from kills_survived import Survived

    path = tmp_path / "kills.json"
    kill = Survived(kind="core", moment="random", processes=1, flowing_after_s=1.0, gaps_s=[1.0, 2.0])
    again = Survived(kind="rank", moment="recovery", processes=2, flowing_after_s=3.0, gaps_s=[3.0, 4.0])
    first = Recording(path, seed=0, streams=2, rested=True)
    first.note(SimpleNamespace(compared=3, tokens=30, waits_s=[0.5, 0.75], wrong=[]), [kill])  # and then it is cut short
    found = json.loads(path.read_text())
    assert found["summary"]["parts_cut_short"] == 1 and found["parts"][0]["first_token_p95_s"] == 0.75

    second = Recording(path, seed=1, streams=2, rested=True)
    second.note(SimpleNamespace(compared=4, tokens=40, waits_s=[], wrong=["stream 1"]), [kill, again])
    second.end(5, ["a log"])
    summary = json.loads(path.read_text())["summary"]
    assert summary == json.loads(json.dumps(second.summary))
    assert summary["kills"] == 3 and summary["moments"] == {"random": 2, "recovery": 1}
    assert summary["answers_compared"] == 7 and summary["tokens"] == 70 and summary["logs"] == 5
    assert summary["wrong"] == ["stream 1", "a log"] and summary["gap_max_s"] == 4.0
    assert summary["first_stream_p50_of_one_kill_s"] == 1.0
    assert summary["gap_p95_of_one_kill_s"] == 2.0 and summary["parts_cut_short"] == 1


def test_a_file_of_another_form_is_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from kills_record import Recording

    path = tmp_path / "kills.json"
    path.write_text('{"command": "another", "survived": []}')
    with pytest.raises(msgspec.ValidationError):
        Recording(path, seed=0, streams=2, rested=True)


def test_an_engine_core_killed_before_its_first_segment_has_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from kills_survived import logs_verified

    (tmp_path / "empty").mkdir()
    assert logs_verified(tmp_path) == (0, [])
    (tmp_path / "empty" / "another-file").touch()
    with pytest.raises(UnusableLog, match="holds no segment"):
        logs_verified(tmp_path)
