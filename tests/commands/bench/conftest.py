"""The path to the fake server of tests/server, which load is sent to here, and a look at the figures of every report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vnext.commands.bench import bounds, running

sys.path += [str(Path(__file__).parents[2] / room) for room in ("server", "runtime", "commands/bench/load")]


@pytest.fixture(autouse=True)
def every_figure_was_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on a figure that is not known before the run is refused: each that a report has must be."""
    known: list[str] = []

    def require(asked: Any, given: Any) -> None:
        known[:] = bounds.figures_of(given)
        bounds.require_measured(asked, given)

    def report(*, result: Any, **given: Any) -> Any:
        assert {*result.figures} <= {*known}, {*result.figures} - {*known}
        return made(result=result, **given)

    made = running.make_report
    monkeypatch.setattr(running, "require_measured", require)
    monkeypatch.setattr(running, "make_report", report)
