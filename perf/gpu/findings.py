"""Findings: the results of the check, one JSON line each, written to disk at once.

Owns the file and its lines. A part that hangs, dies or is killed keeps its findings so far. Several processes append to the
same file: each line is one write. Every line names its part and is one of

    {"figure": {...}}   {"detail": name, "value": ...}   {"verdict": ..., "why": ...}
    {"collected": [test, ...]}   {"started": test}   {"test": test, "outcome": ..., "why": ...}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from perf.gpu.report import DIED, FAILED, Figure, Report, Verdict

WORST_FIRST = ("failed", DIED, "passed", "skipped")
"""Outcomes of a test. A test that passed but left the device in an error has both lines and counts as failed."""


class Findings:
    """One part's side of the file."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def note(self, **values: Any) -> None:
        """Append one line."""
        line = json.dumps({"part": self.part} | values) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def figures(self, *figures: Figure) -> None:
        for each in figures:
            self.note(figure=each._asdict())

    def detail(self, name: str, value: Any) -> None:
        self.note(detail=name, value=value)

    def verdict(self, verdict: Verdict) -> None:
        self.note(verdict=verdict.verdict, why=verdict.why)

    def lines(self) -> list[dict[str, Any]]:
        """Return this part's lines so far, without a truncated last line."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return [line for line in found if line["part"] == self.part]

    def report(self, why_unfinished: str) -> Report:
        """Return the part's report; without a verdict it has failed, for `why_unfinished`."""
        lines = self.lines()
        verdict = Verdict(FAILED, why_unfinished)
        for line in lines:
            if "verdict" in line:
                verdict = Verdict(line["verdict"], line["why"])
        figures = tuple(Figure(**line["figure"]) for line in lines if "figure" in line)
        details = {line["detail"]: line["value"] for line in lines if "detail" in line}
        return Report(*verdict, figures, details, tests_of(lines))


def tests_of(lines: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return test -> (outcome, why) of every started test. A test without an outcome ended its process."""
    found = {line["started"]: (DIED, "its process ended, or its time") for line in lines if "started" in line}
    seen: dict[str, tuple[str, str]] = {}
    for line in lines:
        if "test" in line:
            reported = (line["outcome"], line["why"])
            seen[line["test"]] = min(
                seen.get(line["test"], reported), reported, key=lambda each: WORST_FIRST.index(each[0])
            )
    return found | seen


def collected(lines: list[dict[str, Any]]) -> list[str]:
    """The tests that the first run of a part found."""
    return next((line["collected"] for line in lines if "collected" in line), [])
