"""compare: what differs between two logs: settings, work, cache, steps of one size, latencies, and the first other decision.

Owns the comparison of figures; `diff` owns that of events. Requests that came one after the other felt the same queue, so stretches
of them are drawn, not single ones (circular block bootstrap: Politis, Romano, 1992). Logs that differ by chance alone are said to
differ in about 1 pair of 20, whatever the number of figures (Holm, A simple sequentially rejective multiple test procedure, 1979).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console

from vnext.replay.answers.diff import Diff, Field, diff, header_fields, short
from vnext.replay.answers.stat import Stat, stat
from vnext.replay.console import render
from vnext.replay.console.commands import index_of, print_answer
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.tables.columns import Columns, Log

DRAWS, CHANCE = 1000, 0.05
DRAWN_AT_ONCE = 1 << 21
"""Values drawn at once, which bounds memory."""
SETTINGS_SHOWN = 3
STEPS_MIN = 3
"""A size of steps counts where both logs have so many of it."""
FASTER = 0.05
"""Steps of one size that differ by less are alike."""
NAMES = {
    "prompt_tokens": "tokens of a prompt", "tokens": "tokens of an answer", "ttft_ms": "first token, ms", "itl_ms": "gap, ms",
    "e2e_ms": "whole request, ms",
}  # fmt: skip
KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda sorted_: sorted_.mean(axis=-1),
    "median": lambda sorted_: sorted_[..., (sorted_.shape[-1] - 1) // 2],
    "99 %": lambda sorted_: sorted_[..., int(0.99 * (sorted_.shape[-1] - 1))],
}  # fmt: skip


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in both logs. 95 % of the draws of its relative change lie from `low` to `high`, None where none can be drawn. `p`:
    how likely chance alone differs so much in any of the figures."""

    name: str
    one: float
    other: float
    low: float | None = None
    high: float | None = None
    p: float = 1.0

    @property
    def is_real(self) -> bool:
        return self.p <= CHANCE


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """`differs` says in sentences what stands out, `settings` differ, `figures` are side by side. Steps of one size take
    `step_ratio` times as long in the other log, None where no size is in both. `first` is the first event that differs."""

    differs: list[str]
    settings: list[Field]
    figures: list[Change]
    step_ratio: float | None
    first: str


def compared(one: Path, other: Path) -> Compared:
    """Compare two logs. Raises UnusableLog."""
    logs, stats = (Log(one), Log(other)), (stat(index_of(one)), stat(index_of(other)))
    figures = [*_of_whole_logs(logs, stats), *of_requests(*(log.requests for log in logs))]
    ratio = step_ratio(*(log.steps for log in logs))
    settings = header_fields(open_log(one), open_log(other))
    return Compared(
        differs=list(_sentences(settings, figures, ratio)), settings=settings, figures=figures, step_ratio=ratio,
        first=_first(one, other),
    )  # fmt: skip


def _of_whole_logs(logs: tuple[Log, Log], stats: tuple[Stat, Stat]) -> list[Change]:
    pairs = {
        "requests": [float(len(log.requests["id"])) for log in logs],
        "requests a second": [_rate(log.requests["came"]) for log in logs],
        "hit rate": [each.hit_rate for each in stats],
        "preemptions": [float(each.preemptions) for each in stats],
    }
    return [Change(name=name, one=one, other=other) for name, (one, other) in pairs.items()]


def _rate(came: np.ndarray) -> float:
    """Arrivals a second; 0 where that is not known."""
    known = came[~np.isnan(came)]
    return float((len(known) - 1) / (known[-1] - known[0])) if len(known) > 1 and known[-1] > known[0] else 0.0


def of_requests(one: Columns, other: Columns) -> list[Change]:
    """The spreads of the requests' columns in both logs, of those that have a value, in their order of arrival. Nothing is drawn of
    a column that is the same in both."""
    rng, found = np.random.default_rng(0), list[Change]()
    for name, words in NAMES.items():
        ones, others = (column[~np.isnan(column)] for column in (each[name].astype(float) for each in (one, other)))
        if len(ones) and np.array_equal(ones, others):
            alike = {kind: float(of(np.sort(ones))) for kind, of in KINDS.items()}
            found += [Change(name=f"{words}, {kind}", one=value, other=value) for kind, value in alike.items()]
        elif len(ones) and len(others):
            draws = _drawn(ones, rng), _drawn(others, rng)
            found += [
                _change(f"{words}, {kind}", float(of(np.sort(ones))), float(of(np.sort(others))), draws[0][place], draws[1][place])
                for place, (kind, of) in enumerate(KINDS.items())
            ]
    corrected = holm(np.array([each.p for each in found]))
    return [replace(each, p=float(p)) for each, p in zip(found, corrected)]


def _drawn(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The figures of samples drawn from values in stretches of about their square root (float64[kinds, DRAWS])."""
    count = len(values)
    length = int(np.ceil(np.sqrt(count)))
    found, rows = [], max(1, DRAWN_AT_ONCE // count)
    for begin in range(0, DRAWS, rows):
        starts = rng.integers(count, size=(min(rows, DRAWS - begin), -(-count // length), 1))
        places = (starts + np.arange(length)).reshape(len(starts), -1)[:, :count] % count
        drawn = np.sort(values[places], axis=1)
        found.append(np.array([of(drawn) for of in KINDS.values()]))
    return np.concatenate(found, axis=1)


def _change(name: str, one: float, other: float, ones: np.ndarray, others: np.ndarray) -> Change:
    more, less = ((1 + np.count_nonzero(sign * (others - ones) >= 0)) / (1 + DRAWS) for sign in (1, -1))
    if not ones.all():
        return Change(name=name, one=one, other=other, p=min(2 * more, 2 * less, 1.0))
    low, high = map(float, np.percentile(others / ones - 1, (50 * CHANCE, 100 - 50 * CHANCE)))
    return Change(name=name, one=one, other=other, low=low, high=high, p=min(2 * more, 2 * less, 1.0))


def holm(p: np.ndarray) -> np.ndarray:
    """The p-values of several tests (float64[n]) as one may judge them together."""
    order = np.argsort(p)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return corrected


def step_ratio(one: Columns, other: Columns) -> float | None:
    """How many times as long steps of the same tokens and requests take in the other log: the geometric mean over sizes of the
    ratios of medians, by how often both have the size. None where they share no size."""
    sides = [_by_size(each) for each in (one, other)]
    common = [(size, min(len(side[size]) for side in sides)) for size in sides[0].keys() & sides[1].keys()]
    common = [(size, count) for size, count in common if count >= STEPS_MIN]
    if not common:
        return None
    logs = [np.log(np.median(sides[1][size]) / np.median(sides[0][size])) for size, _ in common]
    return float(np.exp(np.average(logs, weights=[count for _, count in common])))


def _by_size(steps: Columns) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    for tokens, requests, ms in zip(steps["tokens"].tolist(), steps["requests"].tolist(), steps["ms"].tolist()):
        if tokens and ms > 0:
            found.setdefault((tokens, requests), []).append(ms)
    return found


def _first(one: Path, other: Path) -> str:
    try:
        found: Diff = diff(open_log(one), open_log(other))
    except UnusableLog as error:
        return str(error)
    if not found.fields:
        return "the logs have the same events"
    at = f"step {found.step}" if found.step >= 0 else "before the first step"
    fields = ", ".join(f"{field.name} is {field.one} and {field.other}" for field in found.fields[:2])
    return f"{at}, event {found.event}: {found.what}: {fields}"


def _sentences(settings: list[Field], figures: list[Change], ratio: float | None) -> Iterator[str]:
    if settings:
        shown = [f"{short(each.name)} is {each.other} instead of {each.one}" for each in settings[:SETTINGS_SHOWN]]
        more = [f"and {len(settings) - SETTINGS_SHOWN} more"] if len(settings) > SETTINGS_SHOWN else []
        yield f"settings differ: {', '.join([*shown, *more])}"
    if ratio is not None and abs(ratio - 1) > FASTER:
        yield f"steps of the same size take {ratio:.2f} times as long"
    by_name = {each.name: each for each in figures}
    hits = by_name["hit rate"]
    if abs(hits.other - hits.one) > FASTER:
        yield f"the prefix cache had {hits.other:.0%} of the prompts' tokens instead of {hits.one:.0%}"
    for name in NAMES.values():
        kinds = [by_name[each] for each in (f"{name}, {kind}" for kind in KINDS) if each in by_name]
        if real := [each for each in kinds if each.is_real]:
            yield f"{real[0].name}: {real[0].other:,.1f} instead of {real[0].one:,.1f}"


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    comparing = command(
        "compare", run, "show what differs between two logs: work, settings, step times, hits, latencies",
        "Says which changes are more than chance.",
    )  # fmt: skip
    comparing.add_argument("other", metavar="OTHER", type=Path, help="the log to compare with")


def run(arguments: argparse.Namespace, console: Console) -> None:
    print_answer(arguments, console, compared(arguments.log, arguments.other), print_compared)


def print_compared(console: Console, answer: Compared) -> None:
    """What stands out, then all figures."""
    for line in answer.differs or ["nothing stands out: settings, work and times are alike"]:
        console.print(render.printable(line), style="bold", soft_wrap=True)
    console.print(f"first difference: {render.printable(answer.first)}", soft_wrap=True)
    render.records(console, "figures", ("figure", "one", "other", "change"), [
        {"figure": each.name, "one": f"{each.one:,.2f}", "other": f"{each.other:,.2f}", "change": _shown(each)}
        for each in answer.figures
    ])  # fmt: skip


def _shown(each: Change) -> str:
    if each.low is None or each.high is None:
        return "-" if not each.one else f"{each.other / each.one - 1:+.1%}"
    return f"{each.low:+.1%} to {each.high:+.1%}{'' if each.is_real else ', may be chance'}"
