"""What somebody types who does not know the log yet: a wrong time, request or folder is one sentence, and a table fits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from log_drive import record

from vnext.log.timestamps import TimestampEncoder
from vnext.replay.cli.main import main
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import Window, recorded

sys.path.append(str(Path(__file__).resolve().parent / "causes"))

import incidents  # noqa: E402  (needs the path above)

IN_A_WINDOW = ("stat", "stat --by client", "slow", "clients", "cost", "explain", "report -o page.html")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("strangers")
    incidents.record(made, "noisy")
    return made / "noisy"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says, which is one sentence and nothing else."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize("time", ["2020-01-01T14:03", "+9999"])
@pytest.mark.parametrize("command", IN_A_WINDOW)
def test_a_time_of_another_day_is_told_the_times_of_the_log(log, tmp_path, monkeypatch, capsys, command, time) -> None:
    monkeypatch.chdir(tmp_path)
    name, *more = command.split()
    said = refusal(capsys, name, log, *more, "--at", time)
    assert re.search(r"nothing was recorded between these times: the log is of \d{4}-\d\d-\d\d \S+ to \d{4}-\d\d-\d\d \S+ UTC", said)
    assert not (tmp_path / "page.html").exists()


def test_a_time_in_a_hole_is_told_the_nearest_ones(tmp_path) -> None:
    encoder = TimestampEncoder(0)
    for event, second in enumerate((1, 2, 100, 101)):
        encoder.add(event + 1, second * 1_000_000)
    encoder.end_block()
    log_dir = record(tmp_path / "log", arrivals=1)
    next(log_dir.glob("*.vnextlog")).with_suffix(".vnexttimes").write_bytes(bytes(encoder.data))
    timestamps = timestamps_of(open_log(log_dir))
    with pytest.raises(UnusableLog, match="the nearest are 1970-01-01 00:00:02 and 1970-01-01 00:01:40 UTC"):
        recorded(timestamps, Window(3e6, 99e6))
    for window in (Window(2e6, 3e6), Window(99e6, 101e6), Window(0.0, 2e6)):
        assert recorded(timestamps, window) == window


@pytest.mark.parametrize("command", ["req {log} 99999", "explain {log} --request 99999"])
def test_an_unknown_request_is_told_which_there_are(log, capsys, command) -> None:
    assert "request 99999 is not in this log: it holds requests 0 to " in refusal(capsys, *command.format(log=log).split())


@pytest.mark.parametrize("time, where", [("+9999", "after the log's last time"), ("2020-01-01T14:03", "before the log's first time")])
def test_no_step_is_shown_for_a_time_of_another_day(log, capsys, time, where) -> None:
    assert f"{time} is {where}: the log is of " in refusal(capsys, "show", log, time)


@pytest.mark.parametrize("command, words", [
    ("explain {log} --request 1 --client 7b", "leave --client out"), ("stat {log} --slo ttft=1s", "as --by client"),
    ("profile {log} --steps x:y", ": --steps x:y: write whole numbers"),
])  # fmt: skip
def test_an_option_that_cannot_be_meant_is_refused(log, capsys, command, words) -> None:
    assert words in refusal(capsys, *command.format(log=log).split())


def test_a_fleet_lacks_no_log_in_silence(log, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path, words in (("missing", "there is no log at"), ("empty", "holds no segment"), ("notes.txt", "not a segment")):
        assert words in refusal(capsys, "fleet", log, tmp_path / path)


def test_a_log_named_twice_is_one_engine(log, monkeypatch, capsys) -> None:
    monkeypatch.chdir(log.parent)
    assert main(["fleet", "noisy", "../" + log.parent.name + "/noisy"]) == 0
    assert "engines: 1" in capsys.readouterr().out


def test_engines_side_by_side_fit_a_terminal_whole(log, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["what-if", str(log), "--replicas", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("\u2026" in line for line in lines) and all(word in "".join(lines) for word in ("replicas", "policy", "largest"))
    assert [line.split()[0] for line in lines if "%" in line and line.split()[0].isdecimal()] == ["1", *"2222"]


@pytest.mark.parametrize("settings", ["policy=fair", "max_model_len=100"])
def test_what_might_have_been_fits_a_terminal(log, monkeypatch, capsys, settings) -> None:
    """A count that is 0 in every run has no column; one that is not is there with its key."""
    monkeypatch.setenv("COLUMNS", "80")
    main(["what-if", str(log), "--sweep", settings, "--slo", "ttft=1s"])
    found = capsys.readouterr().out
    head = next(line for line in found.splitlines() if line.startswith(" configuration"))
    assert ("gave" in head, "preemptions" in found) == (False, False)
    assert (" no" in head, "no: refused requests" in found) == ((settings != "policy=fair",) * 2)
    assert all(re.search(r" \d+%", line) for line in found.splitlines() if line.startswith((" as recorded", " unchanged")))
