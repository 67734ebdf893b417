"""Bytecode that is written before a run's processes begin is what they read, and no test was run for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_it_is_what_pytest_would_write(root: Path, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("open('ran', 'a').close()\n\n\ndef test_one():\n    assert 1 + 1 == 3, 'wrong'\n")
    (tmp_path / "helper.py").write_text("raise ValueError\n")
    options = ("-p", "no:cacheprovider", "-q", "--color=no", "--rootdir", str(tmp_path))

    def run(*more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(root / "tests" / "run"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *options, *more, str(tmp_path)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False).stdout

    assert "no tests ran" in run("-p", "rewriting", "--noconftest")
    [written] = (tmp_path / "__pycache__").iterdir()
    before = written.stat()
    assert written.name.startswith("test_one.") and not (tmp_path / "ran").exists()
    assert "wrong" in run() and (tmp_path / "ran").exists()
    after = written.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
