"""The kernels under AddressSanitizer: shared and global memory, each allocation with its ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_shim import compiler

HERE = Path(__file__).parent
TIMEOUT_S = 120


def sanitizer() -> str | None:
    """The library that must be loaded first, where the compiler has one."""
    if compiler() is None:
        return None
    name = "libasan.so"
    found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    return None if found == name else str(Path(found).resolve())


needs_sanitizer = pytest.mark.skipif(sanitizer() is None, reason="the C++ compiler here has no AddressSanitizer")


def run(root: Path, folder: Path, *wish: str) -> subprocess.CompletedProcess[str]:
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    paths = os.pathsep.join((str(root), str(HERE), str(HERE.parent), str(HERE.parent / "runtime")))
    return subprocess.run(
        [sys.executable, str(HERE / "sanitized.py"), str(folder), *wish],
        env={**os.environ, "LD_PRELOAD": str(sanitizer()), "ASAN_OPTIONS": options, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@needs_sanitizer
def test_kernels_touch_only_what_is_theirs(root: Path, libraries: Path) -> None:
    ran = run(root, libraries)
    assert (ran.stdout, ran.returncode) == ("clean\n", 0), ran.stderr[-3000:]


@needs_sanitizer
def test_an_overrun_is_named_with_its_line(root: Path, libraries: Path) -> None:
    ran = run(root, libraries, "overrun")
    assert ran.returncode != 0 and "clean" not in ran.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in ran.stderr and "rows.cu:" in ran.stderr, ran.stderr[-3000:]
