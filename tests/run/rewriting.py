"""A plugin of pytest that writes the bytecode of all tests with their asserts rewritten, and runs none of them.

Collecting them would write it, too, and import all that they import: most of what it takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves every file out, and writes those that pytest would rewrite."""
    if collection_path.is_dir():
        return None
    if collection_path.match("test_*.py") or collection_path.name == "conftest.py":
        folder = get_cache_dir(collection_path)
        folder.mkdir(exist_ok=True)
        written = folder / (collection_path.stem + PYC_TAIL)
        if _read_pyc(collection_path, written) is None:
            source_hash, code = _rewrite_test(collection_path, config)
            _write_pyc(config.stash[assertstate_key], code, source_hash, written)
    return True
