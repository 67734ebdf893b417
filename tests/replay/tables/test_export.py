"""A log as tables and in other tools' forms: the columns agree with what other commands say of the same log."""

from __future__ import annotations

import csv
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from log_drive import record

from tests.replay.log_answers import answer, events_of
from vnext.replay import Log
from vnext.replay.cli.main import main
from vnext.replay.tables.export import _cell
from vnext.state.events import StepCommitted


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("tables") / "log", "full", arrivals=60, timestamped=True)


def test_columns_are_those_of_the_log(log, capsys) -> None:
    tables, info = Log(log), answer(capsys, "info", log)[1]
    requests, steps = tables.requests, tables.steps
    assert len(requests["id"]) == info["requests"] and requests["prompt_tokens"].sum() == info["prompt_tokens"]
    assert requests["tokens"].sum() <= info["sampled_tokens"] and len(set(requests["name"])) == len(requests["id"])
    for id_ in np.flatnonzero(requests["end"] == "length")[:5].tolist():
        assert answer(capsys, "req", log, id_)[1]["generated_tokens"] == requests["tokens"][id_]
    came, first, last, e2e_ms = (requests[name][requests["tokens"] > 0] for name in ("came", "first", "last", "e2e_ms"))
    assert (came <= first).all() and (first <= last).all() and np.allclose(e2e_ms, 1e3 * (last - came))
    real = {name: column[steps["stopped"] == ""] for name, column in steps.items()}
    assert len(real["ms"]) == info["steps"] and (real["ms"] >= 0).all()
    assert real["tokens"].sum() <= answer(capsys, "stat", log)[1]["computed_tokens"]
    assert requests["step_ms"].sum() == pytest.approx(real["ms"].sum(), rel=1e-6)


def test_steps_that_are_heard_of_at_once_are_all_there(tmp_path, monkeypatch) -> None:
    begun_ns, turns = time.monotonic_ns(), itertools.count()
    monkeypatch.setattr(time, "monotonic_ns", lambda: begun_ns + next(turns) // 3 * 2_000_000)
    path = record(tmp_path / "log", "full", arrivals=20, timestamped=True)
    steps, committed = Log(path).steps, [event.step for event in events_of(path) if isinstance(event, StepCommitted)]
    real = {name: column[steps["stopped"] == ""] for name, column in steps.items()}
    assert real["step"].tolist() == committed and 0 < (real["ms"] == 0).sum() < len(committed)


def test_a_log_without_times_has_all_its_steps_too(tmp_path, capsys) -> None:
    path = record(tmp_path / "log", "full", arrivals=60)
    steps, committed = Log(path).steps, [event.step for event in events_of(path) if isinstance(event, StepCommitted)]
    assert steps["step"].tolist() == committed and (steps["ms"] == 1).all()


def test_events_are_in_their_order_with_their_times(log) -> None:
    events, all_ = Log(log).events, events_of(log)
    assert events["kind"].tolist() == [type(event).__name__ for event in all_]
    assert events["event"].tolist() == list(range(events["event"][0], events["event"][0] + len(all_)))
    assert (np.diff(events["at"]) >= 0).all() and {len(column) for column in events.values()} == {len(all_)}
    came = events["at"][events["kind"] == "RequestArrived"]
    assert np.allclose(came, Log(log).requests["came"])


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_tables_are_read_as_they_were_written(log, capsys, tmp_path, form) -> None:
    code, written = answer(capsys, "export", log, "--to", form, "-o", tmp_path / "out")
    read = {"csv": pyarrow.csv.read_csv, "parquet": pyarrow.parquet.read_table, "arrow": pyarrow.feather.read_table}[form]
    tables = Log(log)
    for name in ("requests", "steps"):
        frame = read(tmp_path / "out" / f"{name}.{form}")
        expected = getattr(tables, name)
        assert frame.column_names == list(expected) and written["files"][str(tmp_path / "out" / f"{name}.{form}")] == len(frame)  # rows
        for column in ("tokens", "ended"):
            assert np.allclose(frame[column].to_numpy(), expected[column], equal_nan=True)
    assert code == 0


@pytest.mark.parametrize("form, words", [("perfetto", "events"), ("otlp", "spans"), ("csv", "rows")])
def test_what_a_file_is_made_of_is_told(log, capsys, tmp_path, form, words) -> None:
    assert main(["export", str(log), "--to", form, "-o", str(tmp_path / "out")]) == 0
    assert all(line.endswith(f" {words}") for line in capsys.readouterr().out.splitlines())


def test_spans_are_those_of_a_collector(log, capsys, tmp_path) -> None:
    assert answer(capsys, "export", log, "--to", "otlp", "-o", tmp_path / "spans.json")[0] == 0
    (resource,) = json.loads((tmp_path / "spans.json").read_text())["resourceSpans"]
    spans = resource["scopeSpans"][0]["spans"]
    assert len({span["spanId"] for span in spans}) == len(spans) > 0
    for span in spans:
        assert len(span["traceId"]) == 32 and len(span["spanId"]) == 16
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert all(int(event["timeUnixNano"]) <= int(span["endTimeUnixNano"]) for event in span["events"])


def test_a_timeline_is_the_one_of_trace(log, capsys, tmp_path) -> None:
    answer(capsys, "export", log, "--to", "perfetto", "-o", tmp_path / "one.json")
    answer(capsys, "trace", log, "-o", tmp_path / "other.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_what_cannot_be_written_has_one_sentence(log, capsys, tmp_path, monkeypatch) -> None:
    from vnext.replay.cli.main import main

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(log), "--to", "parquet", "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'vnext[parquet]'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["export", str(log), "--to", "csv", "-o", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_name_is_no_formula(tmp_path) -> None:
    with (tmp_path / "x.csv").open("w") as file:
        csv.writer(file).writerow([_cell("=1+1"), _cell(-1), _cell(float("nan")), _cell("")])
    assert (tmp_path / "x.csv").read_text().strip() == "'=1+1,-1,,"
