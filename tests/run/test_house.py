"""Tests of scripts/house.py: what it counts, on a small tree, and its report of this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import called  # noqa: E402  (needs the path above)
import house  # noqa: E402

SOURCE = '''
from typing import Any, NamedTuple

class Row(NamedTuple):
    one: int
    two: int

class Wide:
    declared: int

    def __init__(self, one: Any, *others: Any, key: int = 0, **rest: int) -> None:
        self.one, self.two = one, others
        self.one = self.declared = key
        other = rest
        other.three = 3

    def read(self) -> list[Any]:
        return [self.one, self.four]

def read(one): pass
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "vnext" / "room"
    folder.mkdir(parents=True)
    (folder / "wide.py").write_text(SOURCE)
    (folder / "__init__.py").write_text('"""A room."""\n')
    (folder / "long.py").write_text("\n" * house.SHORT_LINES)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    return tmp_path


def test_what_is_counted(tree: Path) -> None:
    assert house.attribute_counts() == {"Wide": 3}
    assert house.parameter_counts() == {"Wide.__init__": 5, "Wide.read": 1, "read": 1}
    assert house.any_count() == 3
    assert house.short_files() == ["vnext/room/wide.py"]


def test_files_that_mypy_does_not_judge(tree: Path) -> None:
    (tree / "mypy.ini").write_text("[mypy]\nfiles = vnext/other, vnext/room\n")
    assert house.unjudged_files() == []
    (tree / "mypy.ini").write_text("[mypy]\nfiles = vnext/ro\n")
    assert len(house.unjudged_files()) == 3
    left_out = "(?x)(\n    ^vnext/room/(long|wide)\\.py$ |\n    ^vnext/gone\\.py$\n    )"
    (tree / "mypy.ini").write_text(f"[mypy]\nfiles = vnext\nexclude = {left_out}\n")
    assert [path.name for path in house.unjudged_files()] == ["long.py", "wide.py"]


def test_a_line_names_value_goal_and_the_worst() -> None:
    measure = house.widest("widths", {"A": 20, "B": 30, "C": 3}, 15)
    assert str(measure).split() == ["widths", "30", ">", "15", "2", "over", "it:", "B", "30,", "A", "20"]
    assert str(house.widest("widths", {"C": 3}, 15)).split() == ["widths", "3", "15"]


def test_processes_note_what_they_run_while_the_mark_stands(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    called.folder_that_notes(notes)
    program = f"""
import time
from pathlib import Path
from called import NOTE, OFF, WRITE, set_mark
from vnext.state.block_hash import block_hashes, root_hash
notes = Path({str(notes)!r})
root = root_hash("", 4)
set_mark(notes, NOTE)
for _ in range(2):
    block_hashes(root, bytes(16), 4)
set_mark(notes, OFF)
root_hash("", 8)
set_mark(notes, WRITE)
while not list(notes.glob("*.json")):
    time.sleep(0.01)
"""
    environment = {"PYTHONPATH": f"{notes}:{ROOT}"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=60)
    assert called.called(notes) == {("state/block_hash.py", "block_hashes"): 2}
