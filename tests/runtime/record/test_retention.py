"""Logs of earlier starts: the oldest go beyond a number or a size; those of running engines, of others and unknown ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vnext import LLM
from vnext.runtime.processes import launch
from vnext.runtime.record import retention
from vnext.runtime.record.retention import forget, lock_folder

PROGRAM = """
import sys
from pathlib import Path
from vnext.runtime.record.retention import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print(lock, flush=True)
sys.stdin.read()
"""


def start(parent: Path, day: int, size: int = 4096) -> Path:
    """What a start of that day has left."""
    folder = parent / f"202601{day:02d}-120000-77-000001"
    folder.mkdir()
    for name in ("segment-000000.vnextlog", "segment-000000.vnexttimes", "segment-000000.vnextcache", "segment-000001.packing"):
        (folder / name).write_bytes(b"x" * size)
    (folder / "rank-0.stacks").write_text("")
    (folder / "profile-000001.json").write_text("")
    (parent / f"{folder.name}.key").write_text("00")
    return folder


def test_names_of_starts_sort_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a second, where an engine core that was killed has been replaced."""
    times_ns = [1_790_000_000_122_293_999, 1_790_000_000_500_000_722, 1_790_000_000_999_999_999, 1_790_000_001_000_000_000]
    given = iter(times_ns)
    monkeypatch.setattr(launch.time, "time_ns", lambda: next(given))
    names = [Path(launch._own_folder(tmp_path)).name for _ in times_ns]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert all(retention.START.fullmatch(name) for name in (*names, "20260101-120000-77-000001"))


def left(parent: Path) -> list[int]:
    return sorted(int(path.name[6:8]) for path in parent.iterdir() if path.is_dir())


def test_the_oldest_starts_go_with_their_keys(tmp_path: Path) -> None:
    starts = [start(tmp_path, day) for day in range(1, 7)]
    forget(starts[-1], 3, 0)
    assert left(tmp_path) == [4, 5, 6] and sorted(path.name for path in tmp_path.glob("*.key")) == [
        f"{each.name}.key" for each in starts[3:]
    ]  # fmt: skip
    forget(starts[-1], 0, 0)
    assert left(tmp_path) == [4, 5, 6]
    forget(starts[-1], 1, 0)
    assert left(tmp_path) == [6]


def test_starts_go_beyond_a_size_too(tmp_path: Path) -> None:
    starts = [start(tmp_path, day, size=2**16) for day in range(1, 7)]
    forget(starts[-1], 0, 3 * 4 * 2**16 + 3 * 8192)
    assert left(tmp_path) == [4, 5, 6]
    forget(starts[-1], 0, 1)
    assert left(tmp_path) == [6]  # never its own


def test_the_log_of_a_running_engine_stays_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    running, newest = start(tmp_path, 1), start(tmp_path, 2)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(running)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) >= 0 and lock_folder(running) == -1
        forget(newest, 1, 1)
        assert left(tmp_path) == [1, 2] and len(list(running.iterdir())) == 6
        process.send_signal(signal.SIGKILL)
        process.wait()
    forget(newest, 1, 0)
    assert left(tmp_path) == [2]


@pytest.mark.parametrize("name", ["notes.txt", "segment-a.vnextlog", "segment-000000.vnextlog.bak"])
def test_a_folder_with_a_file_of_somebody_stays_whole(tmp_path: Path, name: str) -> None:
    old, newest = start(tmp_path, 1), start(tmp_path, 2)
    (old / name).write_text("mine")
    forget(newest, 1, 0)
    assert left(tmp_path) == [1, 2] and len(list(old.iterdir())) == 7


def test_links_folders_in_it_other_names_and_other_owners_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    parent.mkdir()
    elsewhere.mkdir()
    (parent / "20260101-120000-77-000001").symlink_to(start(elsewhere, 1))
    (parent / "my own log").mkdir()
    linked, deep, newest = start(parent, 2), start(parent, 3), start(parent, 9)
    (linked / "segment-000009.vnextlog").symlink_to(elsewhere / "20260101-120000-77-000001.key")
    (deep / "rank-folder").mkdir()
    forget(newest, 1, 0)
    assert len(list(parent.glob("*-77-*[0-9]"))) == 4 and (parent / "my own log").is_dir()
    assert len(list((elsewhere / "20260101-120000-77-000001").iterdir())) == 6
    own = start(parent, 4)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    forget(newest, 1, 0)
    assert own.is_dir()


def test_a_folder_that_cannot_be_read_or_deleted_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(tmp_path / "absent" / "log", 1, 0)
    assert "cannot be read" in caplog.text
    start(tmp_path, 1)
    newest = start(tmp_path, 2)

    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(retention.os, "unlink", fails)
    forget(newest, 1, 0)
    assert left(tmp_path) == [1, 2] and "cannot be deleted: Permission denied" in caplog.text


def test_an_engine_holds_its_log_and_deletes_older_ones(tmp_path: Path) -> None:
    old = start(tmp_path, 1)
    with LLM(log_dir=str(tmp_path), log_keep=1) as llm:
        [log] = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert log != old and lock_folder(log) == -1
        forget(start(tmp_path, 2), 1, 1)
        assert len(llm.generate("Once")[0].outputs) == 1
    lock = lock_folder(log)
    assert lock >= 0
    os.close(lock)
