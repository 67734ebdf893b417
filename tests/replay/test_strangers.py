"""What somebody types who does not know the log yet: a wrong time, request or folder is one sentence, and a table fits."""

from __future__ import annotations

import json
import re
import shutil
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
    ("shrink {log} --law ZZ", "--law ZZ: there is no such law: docs/laws.md lists them"), ("req {log} {nothing}", "named by its number"),
    ("profile {log} --calls {log}/nowhere", "nowhere cannot be read (No such file or directory)"),
    ("convert {log}/nowhere -o x --to jsonl", "nowhere cannot be read (No such file or directory)"),
])  # fmt: skip
def test_an_option_that_cannot_be_meant_is_refused(log, capsys, command, words) -> None:
    assert words in refusal(capsys, *(word.format(log=log, nothing="") for word in command.split()))


@pytest.mark.parametrize("command, words", [
    ("infoo {log}", "COMMAND is 'infoo': did you mean info?"), ("explan {log}", "did you mean explain?"), ("foo {log}", "choose 'info'"),
    ("show {log} --at 14:03", "there is no option --at."), ("slow {log} --topp 3", "there is no option --topp: did you mean --top?"),
    ("clients {log} --by tennant", "--by is 'tennant': did you mean tenant?"), ("clients {log} --by nothing", "choose 'client', 'tenant'"),
])  # fmt: skip
def test_a_slip_of_the_pen_is_told_what_was_meant(log, capsys, command, words) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.format(log=log).split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_refused_by_name(tmp_path, capsys, is_folder, protocol) -> None:
    """As SGLang dumps requests, one file or a folder of them; by its bytes, whatever it is called."""
    dump = tmp_path / "dumps" / ("2026-11-30_14-03-20.pkl" if is_folder else "requests")
    dump.parent.mkdir()
    dump.write_bytes(bytes([0x80, protocol]) + b"]q\0X\x08\0\0\0requestsq\x01a.")
    said = refusal(capsys, "convert", dump.parent if is_folder else dump, "-o", tmp_path / "out", "--to", "jsonl")
    assert "holds pickles" in said and "--log-requests-format json" in said and not (tmp_path / "out").exists()


def test_a_log_without_a_step_is_not_called_well_served(log, tmp_path, capsys) -> None:
    for command in (f"convert {log} -o {tmp_path}/arrivals --to jsonl", f"convert {tmp_path}/arrivals -o {tmp_path}/new --like {log}"):
        assert main(command.split()) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert re.match(r"no step was computed: \d+ requests came, and none was served\n", said), said


def test_two_logs_with_other_events_are_told_them_in_a_line(log, tmp_path, capsys) -> None:
    """With no token of anybody's prompt."""
    for command in (f"convert {log} -o {tmp_path}/arrivals --to jsonl", f"convert {tmp_path}/arrivals -o {tmp_path}/new --like {log}"):
        assert main(command.split()) == 0
    for command, code in (("diff", 1), ("compare", 0)):
        capsys.readouterr()
        assert main([command, str(tmp_path / "new"), str(log), "--json"]) == code
        said = capsys.readouterr().out
        assert "StepPlanned" in said and "prompt=b" not in said and "x00" not in said and re.search(r"arrives with \d+ tokens", said)


def test_a_timeline_of_a_window_has_its_steps_alone(log, tmp_path, capsys) -> None:
    def steps(*window: str) -> set[str]:
        out = tmp_path / "-".join(("t", *window)).replace("+", "")
        assert main(["trace", str(log), *window, "-o", str(out)]) == 0
        return {name for event in json.loads(out.read_bytes())["traceEvents"] if re.match(r"step \d", name := event.get("name", ""))}

    whole, first, rest = steps(), steps("--to", "+2"), steps("--from", "+2")
    assert first and rest and first < whole and rest < whole and first | rest == whole
    assert len(first & rest) <= 2, "only what was in flight is in both"
    assert "nothing was recorded between" in refusal(capsys, "trace", log, "--at", "+9999", "-o", tmp_path / "none")


def test_a_fleet_lacks_no_log_in_silence(log, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path, words in (("missing", "there is no log at"), ("empty", "holds no segment"), ("notes.txt", "not a segment")):
        assert words in refusal(capsys, "fleet", log, tmp_path / path)


def test_a_log_named_twice_is_one_engine(log, monkeypatch, capsys) -> None:
    monkeypatch.chdir(log.parent)
    assert main(["fleet", "noisy", "../" + log.parent.name + "/noisy"]) == 0
    assert "engines: 1" in capsys.readouterr().out


def test_the_line_of_all_engines_is_no_engine(log, tmp_path, capsys) -> None:
    shutil.copytree(log, tmp_path / "other")
    assert main(["fleet", str(log), str(tmp_path / "other")]) == 0
    said = capsys.readouterr().out
    assert "engines: 2" in said and re.search(r"^ +all ", said, re.MULTILINE)


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
