"""slow: the worst latencies in a log: the latest first tokens, the longest gaps between tokens, the slowest steps.

Owns the starting point of an investigation; `req` and `show` continue from the numbers that it names. Latencies are
noted when a segment's index is built (client_latency.py), so slow folds only segments without an index.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec
from rich.console import Console

from vnext.replay.console import render
from vnext.replay.console.commands import index_of, print_answer, top_of
from vnext.replay.reading.between import between
from vnext.replay.reading.client_latency import KEPT, First, Gap, Step, latency_decoder
from vnext.replay.reading.index import Index
from vnext.replay.reading.joining import joined
from vnext.replay.reading.step_counts import percentiles
from vnext.replay.reading.window import ALWAYS, Window, add_window, asked_window

TOP_MAX = KEPT


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """The worst of each kind, worst first, out of `counts` (first tokens, gaps, steps). The medians of all are in ms
    with three digits, None if no time is known.

    `clock` is "stamps", or "steps" if the log has no times; a step is then one millisecond. `ended` as in `trace`.
    """

    firsts: list[First]
    gaps: list[Gap]
    steps: list[Step]
    counts: tuple[int, int, int]
    medians: tuple[float | None, float | None, float | None]
    clock: str
    ended: str


def slow(index: Index, top: int, window: Window = ALWAYS) -> Slow:
    """The `top` worst of each kind, from the notes beside the log's segments; in a window from its steps. Raises UnusableLog."""
    if window == ALWAYS:
        directories = [segment.directory for segment in index.segments]
        parts = [latency_decoder.decode(each.latency) for each in directories]
        stops = [each.stopped for each in directories]
    else:
        part = between(index, window)
        parts, stops = [part.latency], [part.stopped]
    found = joined(parts)
    firsts, gaps, steps = found.firsts.counts(), found.gaps.counts(), found.steps.counts()
    return Slow(
        firsts=found.firsts.entries()[:top], gaps=found.gaps.entries()[:top], steps=found.steps.entries()[:top],
        counts=(sum(firsts.values()), sum(gaps.values()), sum(steps.values())),
        medians=(_median(firsts), _median(gaps), _median(steps)), clock=found.clock,
        ended=next(filter(None, stops), "complete"),
    )  # fmt: skip


def _median(counts: dict[int, int]) -> float | None:
    return percentiles(counts, (50,))[0] / 1e3 if counts else None


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    seeking = command(
        "slow", run, "list the worst latencies: latest first tokens, longest waits for a token, slowest steps",
        "Begin here, then look at a request with `req` and at a step with `show`.",
    )  # fmt: skip
    seeking.add_argument("--top", type=int, default=5, help="number of entries in each list (default 5)")
    add_window(seeking)


def run(arguments: argparse.Namespace, console: Console) -> None:
    index = index_of(arguments.log)
    answer = slow(index, top_of(arguments, TOP_MAX), asked_window(index.log, arguments))
    print_answer(arguments, console, answer, print_slow)


def print_slow(console: Console, answer: Slow) -> None:
    """Print three tables, each with the median to compare its worst entries with."""
    medians = ["-" if ms is None else f"{ms:,.1f} ms" for ms in answer.medians]
    first, gap, step = (f"{count:,} in total, median {ms}" for count, ms in zip(answer.counts, medians))
    render.records(console, "latest first tokens", ("ms", "request", "arrived", "admitted", "first token", "prompt", "cached"), [
        {"ms": f"{each.ms:,.1f}", "request": f"{each.id}", "arrived": f"before step {each.arrived_step}",
         "admitted": f"step {each.admitted_step}", "first token": f"step {each.step}", "prompt": f"{each.prompt:,}",
         "cached": f"{each.cached:,}"} for each in answer.firsts
    ])  # fmt: skip
    console.print(first, style="dim")
    render.records(console, "longest waits for a token", ("ms", "request", "steps", "preempted", "largest step", "requests"), [
        {"ms": f"{each.ms:,.1f}", "request": f"{each.id}", "steps": f"{each.last_step} to {each.step}",
         "preempted": f"{each.preempted}", "largest step": render.counted(each.tokens, "token"),
         "requests": f"{each.requests}"} for each in answer.gaps
    ])  # fmt: skip
    console.print(gap, style="dim")
    render.records(console, "slowest steps", ("ms", "step", "tokens", "requests", "most for"), [
        {"ms": f"{each.ms:,.1f}", "step": f"{each.step}", "tokens": f"{each.tokens:,}", "requests": f"{each.requests}",
         "most for": f"request {each.most_id}, {render.counted(each.most_tokens, 'token')}"} for each in answer.steps
    ])  # fmt: skip
    console.print(step, style="dim")
    if answer.clock == "steps":
        console.print("the log has no times: a step is taken as a millisecond")
