"""A run of several processes ends, and names the test, when one of them crashes or hangs where no signal is heard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HANG = """
import signal, time
def test_hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(90)
"""
QUIET = "def test_other():\n    pass\n"
OPTIONS = ("-n", "2", "-q", "-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--color=no", "--sample-seed=1")
BOUNDS = ("--timeout=3", "-o", "faulthandler_timeout=6", "-o", "faulthandler_exit_on_timeout=true")
"""Of a test's time, as .ci/run gives them with other numbers."""


@pytest.mark.parametrize(
    ("files", "culprit"),
    [
        (("import os\ndef test_crash():\n    os._exit(0)\n", QUIET), "test_0.py::test_crash"),
        ((QUIET, "import os, time\ndef test_one():\n    time.sleep(0.5)\ndef test_last():\n    os.abort()\n"), "test_1.py::test_last"),
        ((HANG, QUIET), "test_0.py::test_hang"),
    ],
    ids=["at once", "when the others have ended", "hears no signal"],
)
def test_a_crash_ends_the_run(files: tuple[str, ...], culprit: str, tmp_path: Path, root: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "chromium.py", "costs.py", "sampled.py", "walking.py"):
        shutil.copy(root / "tests" / name, tests)
    for at, text in enumerate(files):
        (tests / f"test_{at}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *BOUNDS, "tests"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED")]
    assert ran.returncode == 1 and len(failed) == 1 and f"tests/{culprit} - worker" in failed[0], ran.stdout


def test_the_check_bounds_a_test_twice(root: Path) -> None:
    command = (root / ".ci" / "run").read_text()
    assert all(bound.partition("=")[0] + "=" in command for bound in BOUNDS if "=" in bound)


def test_the_check_names_no_file(root: Path) -> None:
    """scripts/test.sh would run what it names, all of it in one process."""
    [line] = [line for line in (root / ".ci" / "run").read_text().splitlines() if "test.sh" in line and "exec" in line]
    assert all(word.startswith("-") for word in line.partition('test.sh" ')[2].partition(" <")[0].split())
