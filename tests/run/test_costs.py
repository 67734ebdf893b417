"""Tests of costs.py: seconds are added by folder, and what is over its budget is named."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import costs
import pytest

SPENT = {
    "collection": (20.0, 21.0),
    "tests/a/test_long.py": (9.0, 30.0),
    "tests/a/b/test_known.py": (9.0, 9.0),
    "tests/new/test_quick.py": (0.4, 0.5),
    "tests/test_loose.py": (8.5, 2.0),
}


def test_a_folder_and_a_file_over_their_budgets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FOLDERS_S", {"a": 17.0, "collection": 40.0})
    monkeypatch.setattr(costs, "FILES_S", {"tests/a/b/test_known.py": 12.0})
    monkeypatch.setattr(costs, "FILE_S", 8.0)
    heading, *rows = costs.table(SPENT)
    assert heading.split() == ["CPU", "seconds", "of", "tests", "today", "budget", "wall"]
    assert [row.split() for row in rows[:5]] == [
        ["collection", "20", "40", "21"],
        ["a", "18", ">", "17", "39"],
        ["loose", "files", "8", "10", "2"],
        ["new", "0", "10", "0"],
        ["all", "47", "77", "62"],
    ]
    assert rows[5:] == [
        "over its budget: tests/a/test_long.py took 9 of 8 CPU seconds",
        "over its budget: tests/test_loose.py took 8 of 8 CPU seconds",
    ]


def test_seconds_are_those_of_the_process_and_of_what_it_waited_for() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    before_s = costs.cpu_seconds()
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert 0.3 <= costs.cpu_seconds() - before_s
    before_s = costs.cpu_seconds()
    time.sleep(0.5)
    assert costs.cpu_seconds() - before_s < 0.5


def test_the_tables_name_what_is_there(root: Path) -> None:
    assert all((root / file).is_file() and budget > costs.FILE_S for file, budget in costs.FILES_S.items())
    assert all((root / "tests" / folder).is_dir() for folder in costs.FOLDERS_S.keys() - {costs.COLLECTION, costs.LOOSE})
