"""what-if --times-of: requests of a trace, which has no times, on the step times of a recorded log."""

from __future__ import annotations

import json

from log_drive import record
from test_time_holes import restamped

from vnext.replay.cli.main import main
from vnext.replay.futures.recording import on_times_of, recorded
from vnext.replay.reading.source import open_log


def test_an_imported_trace_takes_its_step_times_from_another_log(tmp_path, capsys):
    timed, trace, log = (str(tmp_path / name) for name in ("timed", "trace", "log"))
    record(tmp_path / "timed", arrivals=120, timestamped=True)
    restamped(tmp_path / "timed", lambda *_: True)
    assert main(["convert", timed, "--to", "vllm-vcr", "-o", trace]) == 0
    assert main(["convert", trace, "--like", timed, "-o", log]) == 0
    capsys.readouterr()
    asked = ["what-if", log, "--times-of", timed, "--set", "max_num_seqs=1"]
    assert main([*asked, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    count = len((tmp_path / "trace").read_text().splitlines()) - 1
    assert (
        reported["recorded"] is None
        and reported["steps_fitted"] > 50
        and reported["unchanged"]["requests"] == count > 50
    )
    assert reported["unchanged"]["seconds"] > 1 and reported["unchanged"]["steps"] < reported["runs"][0]["steps"]
    assert main(["what-if", timed, "--set", "max_num_seqs=1", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert all(
        reported[name] == own[name] for name in ("step_error_p50", "step_error_p99", "steps_fitted", "noise", "misfit")
    )
    assert main([*asked, "--json", "--jobs", "2"]) == 0 and json.loads(capsys.readouterr().out) == reported
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "nothing \"as recorded\" to compare with" in printed and "reproduce" not in printed


def test_requests_come_when_the_trace_says(tmp_path):
    timed = record(tmp_path / "timed", arrivals=60, timestamped=True)
    lines = [{"timestamp": ms, "input_length": 5, "output_length": 3, "hash_ids": [ms]} for ms in (70, 570, 2070)]
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["convert", str(tmp_path / "trace"), "--like", str(timed), "-o", str(tmp_path / "log")]) == 0
    taken = on_times_of(open_log(tmp_path / "log"), recorded(open_log(timed)))
    assert [each.time_us for each in taken.outside] == [0, 500_000, 2_000_000]


def test_a_log_without_times_teaches_none(tmp_path, capsys):
    record(tmp_path / "log")
    for asked in ([], ["--times-of", str(tmp_path / "log")]):
        assert main(["what-if", str(tmp_path / "log"), *asked]) == 2
        assert "has no step times" in (said := capsys.readouterr().err) and "--times-of" in said
