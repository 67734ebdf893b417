"""How a log ends is said by every command alike: one line, one exit code, whatever it was asked and however far it read."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from log_drive import as_it_is, record, small_config

from vnext.log import codec
from vnext.replay.cli.main import MODULES, main
from vnext.replay.console.ended import ended
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.runtime.record import segments
from vnext.runtime.record.recorder import Recorder

ROOT = Path(__file__).parents[3]
ARGUMENTS = {
    "info": "{log}", "verify": "{log}", "show": "{log} 2", "state": "{log} 2", "req": "{log} 0", "stat": "{log}", "slow": "{log}",
    "cache": "{log}", "diff": "{log} {whole}", "ranks": "{log}", "redact": "{log} -o {out}", "cut": "{log} 0 4 -o {out}",
    "merge": "{log} {log} -o {out}", "convert": "{log} --to jsonl -o {out}", "shrink": "{log}", "to-test": "{log} -o {out}",
    "trace": "{log} -o {out}", "fork": "{log} 2 --forks 2 --steps 5", "what-if": "{log} --set max_num_seqs=3",
    "gate": "{log} --set max_num_seqs=3 --slo ttft=1s",
    "watch": "{log} --once --whole", "clients": "{log}", "cost": "{log}", "explain": "{log}", "rollouts": "{log} -o {out}",
    "export": "{log} --to csv -o {out}", "compare": "{log} {whole}", "fleet": "{log} {whole}", "report": "{log} -o {out}",
}  # fmt: skip
NEEDS_A_MODEL = {"exec", "bisect", "profile", "audit"}  # judged by test_exec; here they have no model, and refuse
SERVES = {"ui"}
READS_NO_LOG = {"route"}


def flipped(folder: Path) -> None:
    """One bit, in a frame of the middle segment."""
    path = sorted(folder.glob("*.vnextlog"))[1]
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 4
    path.write_bytes(data)


def truncated(folder: Path) -> None:
    """A power cut: the last record is not whole."""
    path = sorted(folder.glob("*.vnextlog"))[-1]
    path.write_bytes(path.read_bytes()[:-5])


def without_the_middle(folder: Path) -> None:
    sorted(folder.glob("*.vnextlog"))[1].unlink()


def killed(folder: Path) -> None:
    """SIGKILL: every frame is whole, and the last word is missing."""
    path = sorted(folder.glob("*.vnextlog"))[-1]
    last = [frame for frame in open_log(folder).items() if isinstance(frame, codec.Frame)][-1]
    assert codec.is_closing(last)
    path.write_bytes(path.read_bytes()[: -len(codec.encode_frame(last.digest, last.body))])


def untouched(folder: Path) -> None:
    pass


ENDS = [
    (flipped, "damaged at frame ", 1), (without_the_middle, "damaged at frame ", 1), (truncated, "killed behind frame ", 0),
    (killed, "killed, or still running: ", 0), (untouched, "complete", 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    config = small_config(page_count=60, digest_interval=64)
    return record(tmp_path_factory.mktemp("ended") / "log", config=config, arrivals=60, size=1500, timestamped=True)


def test_every_command_is_here():
    declared = {name for names in MODULES.values() for name in names}
    assert declared == {*ARGUMENTS, *NEEDS_A_MODEL, *SERVES, *READS_NO_LOG}


@pytest.mark.parametrize(("damage", "line", "code"), ENDS, ids=[damage.__name__ for damage, _, _ in ENDS])
@pytest.mark.parametrize("command", [*ARGUMENTS, *sorted(NEEDS_A_MODEL)])
def test_every_command_says_how_the_log_ends(command, damage, line, code, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "log")
    damage(tmp_path / "log")
    wanted = ended(open_log(tmp_path / "log"))
    assert wanted.line.startswith(line) and wanted.is_sound == (code == 0)
    places = {"log": tmp_path / "log", "whole": whole, "out": tmp_path / "out"}
    words = [command, *(part.format_map(places) for part in ARGUMENTS.get(command, "{log}").split())]
    ended_with = main([*words, "--json"])
    out, err = capsys.readouterr()
    if out:
        reported = json.loads(out)["ended"]
        assert reported == wanted.line or wanted.line in reported  # with its name, where a command has two logs
        assert ended_with == 1 or (ended_with == code == 0)
    else:
        assert ended_with == (2 if wanted.is_sound else 1) and (wanted.is_sound or f"ended: {wanted.line}" in err)
        assert not wanted.is_sound or command in (*NEEDS_A_MODEL, "fork", "gate", "shrink", "to-test", "what-if"), err
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").unlink(missing_ok=True)
    main(words)
    captured = capsys.readouterr()
    assert ("ended: " in captured.out + captured.err) == (wanted.kind != "complete" and (bool(out) or not wanted.is_sound))


@pytest.mark.parametrize("damage", [damage for damage, _, _ in ENDS], ids=lambda damage: damage.__name__)
def test_an_index_says_the_same_as_reading_through(damage, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "log")
    damage(tmp_path / "log")
    log = open_log(tmp_path / "log")
    read = ended(log)
    for segment in Index(log).segments:
        segment.made()
    if read.kind == "complete":
        monkeypatch.setattr(type(log), "items", None)  # nothing is read through
    assert ended(log) == read


def fail(times: set[int], monkeypatch) -> Callable:
    """A disk that is full when these frames come. Change as in `record`."""
    writes = segments.os.write

    def write(fd: int, data: bytes) -> int:
        if write.full:
            raise OSError(28, "No space left on device")
        return writes(fd, data)

    write.full, frames = False, iter(range(10**6))
    monkeypatch.setattr(segments.os, "write", write)

    def change(events, state_digest, ranks):
        write.full = next(frames) in times
        return as_it_is(events, state_digest, ranks)

    return change


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        ({7, 8, 9}, "frames lost: 3 before frame 7, event "),
        ({7, 20, 21}, "frames lost: 3 before frame 7, event "),
    ],
)
def test_a_disk_that_was_full_is_not_complete(lost, line, tmp_path, monkeypatch, capsys):
    log_dir = record(tmp_path / "log", change=fail(lost, monkeypatch))
    for command in ("info", "slow", "stat"):
        assert main([command, str(log_dir), "--json"]) == 1, command
        assert json.loads(capsys.readouterr().out)["ended"].startswith(line)
    assert ("and later ones 1 times" in ended(open_log(log_dir)).line) == (20 in lost)


def test_frames_that_are_lost_at_the_end_are_counted_there(tmp_path, monkeypatch, capsys):
    """The disk has room again when the engine ends; while it has none, the log is not closed."""
    frames = len([item for item in open_log(record(tmp_path / "whole")).items() if isinstance(item, codec.Frame)]) - 1
    change, closing = fail(set(range(frames - 4, frames)), monkeypatch), Recorder.close

    def close(self: Recorder) -> None:
        segments.os.write.full = False
        closing(self)

    monkeypatch.setattr(Recorder, "close", close)
    log_dir = record(tmp_path / "log", change=change)
    assert ended(open_log(log_dir)).line.startswith("frames lost: 4 at its end, event ")
    assert main(["info", str(log_dir)]) == 1 and "frames lost: 4 at its end" in capsys.readouterr().out
    monkeypatch.undo()
    log_dir = record(tmp_path / "full", change=fail(set(range(frames - 4, 10**6)), monkeypatch))
    assert ended(open_log(log_dir)).line.startswith("incomplete: the disk was full") and ended(open_log(log_dir)).kind == "lost"
    assert main(["info", str(log_dir)]) == 1 and "incomplete" in capsys.readouterr().out
    (log_dir / codec.GAP_NAME).unlink()
    assert ended(open_log(log_dir)).line.startswith("killed, or still running")


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_log_that_is_not_closed_is_not_called_complete(command, whole, tmp_path, capsys):
    """What they say of its records comes beside the line that says how the log ends."""
    shutil.copytree(whole, tmp_path / "log")
    killed(tmp_path / "log")
    assert main([command, str(tmp_path / "log")]) == 0
    said = capsys.readouterr().out
    assert "every record is whole" in said and "ended: killed, or still running" in said and "complete" not in said


def test_logs_of_earlier_versions_are_complete_without_a_last_word():
    logs = [open_log(path) for path in sorted((ROOT / "tests" / "golden" / "logs").glob("*/")) if any(path.glob("*.vnextlog"))]
    assert [log.paths[0] for log in logs if ended(log).kind != "complete"] == []
    assert sum(not log.header.closes for log in logs) > 1


def test_parts_of_a_log_are_not_called_killed(whole, tmp_path):
    first, *_, last = open_log(whole).paths
    assert ended(open_log(first)).kind == ended(open_log(last)).kind == "complete"
    record(tmp_path / "idle", arrivals=0)
    assert ended(open_log(tmp_path / "idle")).kind == "complete"
    assert main(["cut", str(whole), "3", "9", "-o", str(tmp_path / "cut")]) == 0
    assert ended(open_log(tmp_path / "cut")).kind == "complete"


def test_the_page_says_it_too(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    flipped(tmp_path / "log")
    command = [sys.executable, "-m", "vnext.replay", "ui", str(tmp_path / "log"), "--json"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert json.loads(served.stdout.readline())["ended"].startswith("damaged at frame ")
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 1
    finally:
        served.kill()


