"""Tables: the runs of one measurement as text, and files of `vnext-bench report` in Markdown, CSV or a page of HTML of its own."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vnext.commands.bench.compare import read

STYLE = (
    "body{font:15px system-ui;margin:2em;color-scheme:light dark}td,th{padding:.2em .8em;text-align:right}"
    "th:first-child{text-align:left;font-weight:500}tr:nth-child(even){background:color-mix(in srgb,currentColor 6%,transparent)}"
)


def table_of(paths: Sequence[Path], form: str) -> str:
    """A line for each figure of any file, a column for each file. Raises SettingsError."""
    found = [read(path).figures for path in paths]
    names = dict.fromkeys(name for figures in found for name in figures)
    rows = [["figure", *(path.stem for path in paths)]]
    rows += [[name, *(f"{figures[name]:.10g}" if name in figures else "" for figures in found)] for name in names]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue().rstrip("\n")
    return _page(rows) if form == "html" else _markdown(rows)


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


def _page(rows: Sequence[Sequence[str]]) -> str:
    """Needs nothing beside itself."""
    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>\n" for row in rows
    )
    head = f'<meta charset="utf-8"><title>vnext-bench</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>vnext-bench</h1><table>\n{body}</table></body></html>'
