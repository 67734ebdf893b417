"""The programs of examples/ and of docs/python.md run as they stand, with the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)


def printed(folder: Path, *command: object) -> str:
    """What a Python program prints; `folder` is its home."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    found = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr, found.stderr
    return found.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.split("from vnext import ")[1].split(",")[0] for each in PROGRAMS])
def test_the_programs_of_the_page(program: str, tmp_path: Path) -> None:
    assert printed(tmp_path, "-c", program)


def test_answers_at_once(tmp_path: Path) -> None:
    lines = printed(tmp_path, ROOT / "examples" / "async_answers.py").splitlines()
    assert sum(line.startswith("What ") for line in lines) == 4 and sum(line.endswith(" ...") for line in lines) == 1
    assert any(line.startswith("What is Python? Python is") for line in lines)
