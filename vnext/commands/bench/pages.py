"""Pages: what `vnext-bench report --format html` shows of reports and result files: one file that loads nothing and has no scripts.

A sweep has curves over its load, with the knee dashed; a file of --save-detailed has its times by the share of requests that they
take, one colour for each file. Every figure stands in a table, with its bounds where the file has them. Owns what is shown; how a
plot looks is as in vnext-replay's reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from vnext.commands.bench.compare import LOAD, TIMES, Measured
from vnext.replay.tables import plots

COLOURS = ("steps", "waiting", "running", "free", "mark")
SHARES = np.linspace(0.0, 99.0, plots.BUCKETS)
"""Percentages; the slowest request in a hundred would hide all others."""
WORDS = {
    "ttft": "Time to first token", "tpot": "Time per token after it", "itl": "Time between two tokens", "e2el": "Time of a request",
}  # fmt: skip
SWEPT = (
    ("Tokens a second", "all requests together", {"output_tokens_per_s": "tokens"}),
    ("Time to first token", "ms", {"ttft_p50_ms": "half of the requests", "ttft_p99_ms": "99 %"}),
    ("Time per token", "ms", {"tpot_p50_ms": "half of the requests", "tpot_p99_ms": "99 %"}),
    ("Requests within the bounds", "%", {"good_share": "good"}),
)  # fmt: skip
STYLE = """
h1::first-letter { text-transform: none; }
td small { color: var(--soft); display: block; font-size: .8em; }
th[scope=row], th:first-child { text-align: left; }
"""


def page_of(names: Sequence[str], measured: Sequence[Measured]) -> str:
    """The whole page; `names` are of the files."""
    title = escape(", ".join(names))
    swept = "".join(_section(escape(name), "By load. Dashed: the knee.", _swept(each)) for name, each in zip(names, measured))
    spread = _section("By share of the requests", "So many of a hundred requests took at most so long.", _spread(names, measured))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>vnext-bench: {title}</title>'
    style = f"<style>{plots.PAGE}{plots.STYLE}{STYLE}</style>"
    body = f"<header><p>vnext-bench</p><h1>{title}</h1></header><main>{swept}{spread}{_tables(names, measured)}</main>"
    return f'<!doctype html><html lang="en"><head>{head}{style}</head><body>{body}</body></html>'


def _section(title: str, note: str, figures: Iterable[str]) -> str:
    drawn = "".join(figures)
    return f'<h2>{title}</h2><p class="note">{note}</p><div class="plots">{drawn}</div>' if drawn else ""


def _swept(measured: Measured) -> Iterator[str]:
    """Curves over the loads of a sweep of two runs or more."""
    runs = sorted(measured.runs, key=lambda run: run.get("load", 0.0))
    loads = np.array([run.get("load", np.nan) for run in runs], float)
    if len(runs) < 2 or not np.isfinite(loads).all() or loads[0] == loads[-1]:
        return
    knee = next((value for name, value in measured.figures.items() if name.startswith("knee_")), np.nan)
    grid = np.linspace(loads[0], loads[-1], plots.BUCKETS)
    axis = plots.Axis(float(loads[0]), float(loads[-1]), lambda load: f"{load:.3g}", float(knee), (np.nan, np.nan))
    for title, unit, names in SWEPT:
        shown = []
        for colour, (name, label) in zip(COLOURS, names.items()):
            if all(name in run for run in runs):
                values = np.array([run[name] for run in runs], float) * (100 if unit == "%" else 1)
                shown.append(plots.Curve(label, colour, np.interp(grid, loads, values)))
        if shown:
            yield plots.curves(title, unit, axis, grid, shown)


def _spread(names: Sequence[str], measured: Sequence[Measured]) -> Iterator[str]:
    """For each metric the files' times up to which so many of a hundred requests came."""
    axis = plots.Axis(0.0, float(SHARES[-1]), lambda share: f"{share:.3g} %", np.nan, (np.nan, np.nan))
    for metric in TIMES:
        shown = [
            plots.Curve(escape(name), COLOURS[place % len(COLOURS)], np.percentile(np.concatenate(each.requests[metric]), SHARES))
            for place, (name, each) in enumerate(zip(names, measured))
            if metric in each.requests
        ]
        if shown:
            yield plots.curves(WORDS[metric], "ms", axis, SHARES, shown)


def _tables(names: Sequence[str], measured: Sequence[Measured]) -> str:
    figures = dict.fromkeys(name for each in measured for name in each.figures)
    loads = [name for name in LOAD if any(each.load.get(name) is not None for each in measured) and name not in figures]
    rows = [(name, [escape(str(each.load.get(name, ""))) for each in measured]) for name in loads]
    rows += [(name, [_cell(each, name) for each in measured]) for name in figures]
    if not rows:
        return '<p class="note">The files have no figures.</p>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("figure", *names))
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, cells in rows
    )
    note = '<p class="note">Small: the bounds by 95 %.</p>' if any(each.intervals for each in measured) else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<h2>All figures</h2>{note}<div class="table" role="region" tabindex="0" aria-label="All figures">{table}</div>'


def _cell(measured: Measured, name: str) -> str:
    """A figure with its bounds."""
    if name not in measured.figures:
        return ""
    low, high = measured.intervals.get(name, (None, None))
    bounds = f"{_number(low)} to {_number(high)}"
    return _number(measured.figures[name]) + (f"<small>{bounds}</small>" if (low, high) != (None, None) else "")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.6g}"
