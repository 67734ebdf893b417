"""The report of a part of the check on a GPU: verdict, reason, figures with targets, and all other findings.

Owns these types; `findings` carries them from a part's process to the check's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, MISSING, SKIPPED = "passed", "failed", "missing", "skipped"
"""`missing`: what the part drives is not in this tree; `skipped`: this machine lacks a tool. Neither has passed."""
DIED = "died"
"""The outcome of a test that ended with its process."""


class Figure(NamedTuple):
    """One measured number; None in a dry run. `target` as people read it, `met` None where there is none or no number."""

    name: str
    value: float | None
    unit: str
    target: str = ""
    met: bool | None = None


class Verdict(NamedTuple):
    """The outcome of a part."""

    verdict: str
    why: str = ""


class Report(NamedTuple):
    """One part's verdict and findings. `tests`: test -> (outcome, why)."""

    verdict: str
    why: str = ""
    figures: tuple[Figure, ...] = ()
    details: dict[str, Any] = {}
    tests: dict[str, tuple[str, str]] = {}


def figure(name: str, value: float | None, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> Figure:
    """A figure with its target, if it has one."""
    if at_least is not None:
        return Figure(name, rounded(value), unit, f">= {at_least:g}", None if value is None else value >= at_least)
    if at_most is not None:
        return Figure(name, rounded(value), unit, f"<= {at_most:g}", None if value is None else value <= at_most)
    return Figure(name, rounded(value), unit)


def rounded(value: float | None) -> float | None:
    """Round to five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def as_values(report: Report) -> dict[str, Any]:
    """Return the report as JSON values."""
    return report._asdict() | {"figures": [each._asdict() for each in report.figures]}


def by_kernel(report: Report) -> dict[str, dict[str, int | str]]:
    """Return test function -> count of each outcome, and why the first failed: one line per kernel and property."""
    found: dict[str, dict[str, int | str]] = {}
    for test, (outcome, why) in sorted(report.tests.items()):
        name, _, case = test.rpartition("/")[2].removeprefix("test_").partition("[")
        counts = found.setdefault(name.replace(".py::test_", ": "), {})
        counts[outcome] = int(counts.get(outcome, 0)) + 1
        if outcome in (FAILED, DIED):
            counts.setdefault("why", f"{'[' * bool(case)}{case} {why}".strip())
    return found
