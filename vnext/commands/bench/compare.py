"""`vnext-bench compare A B`: two reports or result files side by side, and which differences are more than chance.

A report of --json has figures only. A result file of --save-detailed, ours or vLLM's, has each request's times: whole requests are
drawn again and again (bootstrap percentile intervals: Efron, Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13), and a
change is real where 95 % of the draws lie on one side of none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vnext.runtime.protocol.settings import SettingsError

DRAWS, CHANCE = 400, 0.05
TIMES = ("ttft", "tpot", "itl", "e2el")
KINDS: Mapping[str, Callable[[np.ndarray], float]] = MappingProxyType(
    {"mean": lambda values: float(values.mean()), "p50": lambda values: float(np.median(values)),
     "p99": lambda values: float(np.percentile(values, 99))}
)  # fmt: skip
LOAD = ("num_prompts", "request_rate", "burstiness", "max_concurrency", "total_input_tokens", "total_output_tokens")


class Measured(NamedTuple):
    """A file's figures by name, by metric the values of each good request in ms, the figures of each run of a sweep, and the bounds
    of figures."""

    figures: dict[str, float]
    load: dict[str, Any]
    requests: dict[str, list[np.ndarray]]
    runs: Sequence[Mapping[str, float]] = ()
    intervals: Mapping[str, Sequence[float | None]] = MappingProxyType({})


class Row(NamedTuple):
    """A figure in both files; `low` and `high` bound the relative change, None where single requests are not known."""

    name: str
    before: float
    after: float
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float:
        return self.after / self.before - 1 if self.before else float("nan")

    @property
    def is_real(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def compare(before: Path, after: Path) -> tuple[dict[str, float], str]:
    """The ratios after / before by figure, and the table. Raises SettingsError."""
    first, second = read(before), read(after)
    rows = [row for name in TIMES for row in spread_rows(name, first, second)]
    named = {row.name for row in rows}
    common = [name for name in first.figures if name in second.figures and name not in named]
    rows += [Row(name, first.figures[name], second.figures[name]) for name in common]
    if not rows:
        raise SettingsError(f"{before} and {after} have no figure in common.")
    loads = [{name: each.load[name] or "inf" if name == "request_rate" else each.load[name] for name in LOAD if name in each.load}
             for each in (first, second)]  # fmt: skip
    differing = [name for name in LOAD if name in loads[0] and name in loads[1] and loads[0][name] != loads[1][name]]
    notes = [f"note: {name} is {loads[0][name]} there and {loads[1][name]} here" for name in differing]
    return {row.name: row.after / row.before for row in rows if row.before}, "\n".join([*table(rows), *notes])


def read(path: Path) -> Measured:
    """A report of --json, or a result file with vLLM's names. Raises SettingsError."""
    try:
        found = msgspec.json.decode(path.expanduser().read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingsError(f"{path} is no report of --json and no file of --save-result.")
    own = found.get("figures", found)
    figures = numbers_of(own)
    load = found if own is found else found.get("workload", {}) | found.get("load", {})
    try:
        requests = requests_of(found)
    except (TypeError, ValueError, IndexError) as error:
        raise SettingsError(f"{path}: its lists of requests do not fit together.") from error
    runs = [numbers_of(run) for run in found.get("runs", ()) if isinstance(run, dict)]
    bounds = found.get("confidence_95", {})
    return Measured(figures, load, requests, runs, {name: (bounds[name] + [None, None])[:2] for name in bounds})


def numbers_of(found: Mapping[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def requests_of(found: Mapping[str, Any]) -> dict[str, list[np.ndarray]]:
    """By metric an array for each request without an error, in ms; {} where the file has no lists."""
    if not all(isinstance(found.get(name), list) for name in ("ttfts", "itls", "output_lens", "errors")):
        return {}
    lists = [found[name] for name in ("ttfts", "itls", "output_lens", "errors")]
    good = [(ttft, np.asarray(gaps, float), count) for ttft, gaps, count, error in zip(*lists, strict=True) if not error]
    values = {
        "ttft": [np.asarray([ttft]) for ttft, _, _ in good],
        "tpot": [np.asarray([gaps.sum() / (count - 1)]) for _, gaps, count in good if count > 1],
        "itl": [gaps for _, gaps, _ in good if len(gaps)],
        "e2el": [np.asarray([ttft + gaps.sum()]) for ttft, gaps, _ in good],
    }
    return {name: [1e3 * each for each in arrays] for name, arrays in values.items() if arrays}


def spread_rows(name: str, first: Measured, second: Measured) -> list[Row]:
    """The metric's mean and percentiles in both, with intervals."""
    if name not in first.requests or name not in second.requests:
        return []
    drawn = [drawn_spreads(each.requests[name]) for each in (first, second)]
    rows = []
    for place, (kind, of) in enumerate(KINDS.items()):
        before, after = (of(np.concatenate(each.requests[name])) for each in (first, second))
        low, high = np.percentile(drawn[1][place] / drawn[0][place] - 1, [50 * CHANCE, 100 - 50 * CHANCE])
        rows.append(Row(f"{name}_{kind}_ms", before, after, float(low), float(high)))
    return rows


def drawn_spreads(requests: list[np.ndarray]) -> np.ndarray:
    """float64 [KINDS, DRAWS]: the spreads of as many requests, drawn with replacement; the same for the same requests."""
    count, random = len(requests), np.random.default_rng(len(requests))
    draws = (np.concatenate([requests[place] for place in random.integers(count, size=count)]) for _ in range(DRAWS))
    return np.asarray([[of(draw) for of in KINDS.values()] for draw in draws]).T


def table(rows: list[Row]) -> list[str]:
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}}{'before':>14}{'after':>14}{'change':>10}   95 % of draws"]
    for row in rows:
        change = f"{100 * row.change:.1f}%" if row.before or row.after else "0.0%"
        line = f"{row.name:<{width}}{row.before:>14,.2f}{row.after:>14,.2f}{change if row.before or not row.after else '-':>10}"
        if row.low is not None and row.high is not None:
            line += f"   {100 * row.low:+.1f} to {100 * row.high:+.1f} %{'' if row.is_real else '  (may be chance)'}"
        lines.append(line)
    return lines
