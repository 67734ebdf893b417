"""Tests of compiled modules: one sentence refuses a stale one, and Python code replaces one that was not built."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from vnext.base import compiled
from vnext.state.store import columns, fields

COLUMNS = "vnext.state.store._columns"


def built(name: str) -> bool:
    return compiled.load(name) is not None


needs_columns = pytest.mark.skipif(not built(COLUMNS), reason="the state's columns were not compiled here")


@pytest.mark.parametrize("name", [name for name in compiled.MODULES if built(name)])
def test_a_module_names_all_that_it_was_built_from(name: str) -> None:
    """Its own source and whatever that includes, so that a change of any of them is seen."""
    said, *sources = import_module(name).BUILT_FROM.split()
    included = {line.split('"')[1] for source in sources for line in source_lines(source) if line.startswith('#include "')}
    assert {Path(source).name for source in sources} >= {Path(header).name for header in included}
    assert "vnext/base/compiled.h" in sources and compiled.fingerprint(compiled.ROOT, sources) == said


def source_lines(source: str) -> list[str]:
    return (compiled.ROOT / source).read_text().splitlines()


@needs_columns
def test_a_source_that_has_changed_since_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, *sources = import_module(COLUMNS).BUILT_FROM.split()
    for source in sources:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text((compiled.ROOT / source).read_text())
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert built(COLUMNS)
    (tmp_path / sources[-1]).write_text("other")
    with pytest.raises(
        compiled.StaleModule, match=r"_columns.*\.so was built from other sources: build it again: `pip install -e \.`"
    ):
        built(COLUMNS)
    (tmp_path / sources[-1]).unlink()
    with pytest.raises(compiled.StaleModule, match="was built from other sources"):
        built(COLUMNS)


@needs_columns
def test_a_module_without_the_mark_of_its_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(import_module(COLUMNS), "BUILT_FROM")
    with pytest.raises(compiled.StaleModule, match="was built from other sources"):
        built(COLUMNS)


@needs_columns
def test_a_field_that_python_numbers_otherwise_is_refused() -> None:
    with pytest.raises(compiled.StaleModule, match="which number KNOWN as 1, where Python has 2: build it again"):
        compiled.load(COLUMNS, columns.CONSTANTS | {"KNOWN": fields.COMPUTED, "COMPUTED": fields.KNOWN})
    with pytest.raises(compiled.StaleModule, match="which have no NEW_FIELD: build it again"):
        compiled.load(COLUMNS, columns.CONSTANTS | {"NEW_FIELD": 20})


@needs_columns
def test_a_program_ends_with_the_sentence_alone(root: Path) -> None:
    """A field goes in Python, and nothing is built again: no traceback, no wrong answer."""
    code = "from vnext.state.store import fields; fields.FIELD_COUNT = 19; import vnext.replay.cli.main"
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and ran.stdout == ""
    assert ran.stderr.startswith("vnext: /") and len(ran.stderr.splitlines()) == 1
    assert "number FIELD_COUNT as 20, where Python has 19" in ran.stderr


def test_a_module_that_is_not_there_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol: x\nsecond line")

    monkeypatch.setattr(compiled, "absent", {})
    assert compiled.load("vnext.no_such_module") is None
    monkeypatch.setattr(compiled, "import_module", broken)
    assert compiled.load(COLUMNS) is None
    assert compiled.absent == {"vnext.no_such_module": compiled.NOT_BUILT, COLUMNS: "cannot be loaded (undefined symbol: x)"}


def test_leftovers_of_another_layout_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suffix = compiled.EXTENSION_SUFFIXES[0]
    for place in ("vnext/state/_columns", "vnext/state/store/_columns"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{place}{suffix}").touch()
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert compiled.leftovers() == [tmp_path / f"vnext/state/_columns{suffix}"]
