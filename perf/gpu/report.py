"""What a part of the check on a GPU says: its verdict, why, its figures beside their targets, and everything else it saw.

Owns the form and how it goes from a part's process to the check's: one JSON file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, MISSING, SKIPPED = "passed", "failed", "missing", "skipped"
"""`missing`: what the part drives is not in this tree; `skipped`: this machine lacks a tool. Neither has passed."""


class Figure(NamedTuple):
    """One measured number; None in a dry run. `target` as people read it, `met` None where there is none or no number."""

    name: str
    value: float | None
    unit: str
    target: str = ""
    met: bool | None = None


class Report(NamedTuple):
    """Of one part."""

    verdict: str
    why: str = ""
    figures: tuple[Figure, ...] = ()
    details: dict[str, Any] = {}


def figure(name: str, value: float | None, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> Figure:
    """A figure with its target, if it has one."""
    if at_least is not None:
        return Figure(name, rounded(value), unit, f">= {at_least:g}", None if value is None else value >= at_least)
    if at_most is not None:
        return Figure(name, rounded(value), unit, f"<= {at_most:g}", None if value is None else value <= at_most)
    return Figure(name, rounded(value), unit)


def rounded(value: float | None) -> float | None:
    """Five digits."""
    return None if value is None else float(f"{value:.5g}")


def as_values(report: Report) -> dict[str, Any]:
    """The report as JSON has it."""
    return report._asdict() | {"figures": [each._asdict() for each in report.figures]}


def write(report: Report, path: Path) -> None:
    path.write_text(json.dumps(as_values(report), indent=1))


def read(path: Path) -> Report | None:
    """What `write` wrote; None where a part ended before."""
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    return Report(values["verdict"], values["why"], tuple(Figure(**each) for each in values["figures"]), values["details"])
