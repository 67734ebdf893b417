"""Tables: the runs of one measurement as text, and files of `vnext-bench report` in Markdown, CSV or HTML (pages.py)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vnext.commands.bench.compare import read
from vnext.commands.bench.pages import page_of


def table_of(paths: Sequence[Path], form: str) -> str:
    """A line for each figure of any file, a column for each file; `form` is md, csv or html. Raises SettingsError."""
    measured = [read(path) for path in paths]
    if form == "html":
        return page_of([path.stem for path in paths], measured)
    found = [each.figures for each in measured]
    names = dict.fromkeys(name for figures in found for name in figures)
    rows = [["figure", *(path.stem for path in paths)]]
    rows += [[name, *(f"{figures[name]:.10g}" if name in figures else "" for figures in found)] for name in names]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue().rstrip("\n")
    return _markdown(rows)


def runs_table(columns: Mapping[str, str], runs: Sequence[Mapping[str, Any]], best: object = None, word: str = "knee") -> str:
    """The runs of one measurement, a line each; `columns` has the headings of their figures. `best` is marked with the word."""
    names = [name for name in columns if any(name in run for run in runs)]
    lines = ["".join(f"{columns[name]:>15}" for name in names)]
    for run in runs:
        lines.append("".join(f"{_cell(run.get(name, '-')):>15}" for name in names) + (f"  <- {word}" if run is best else ""))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(rows[0]) - 1)}", *lines[1:]])
