"""The commands that measure and compare: stat, slow, cache, diff, ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from vnext.replay.answers import cache, clients, slow
from vnext.replay.answers.diff import Diff, Field, diff
from vnext.replay.answers.ranks import RankLine, Ranks, ranks
from vnext.replay.answers.stat import Stat, stat
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, index_of, print_answer
from vnext.replay.console.render import PERCENTILE_NAMES, counted, facts, records
from vnext.replay.reading.objective import objective_of
from vnext.replay.reading.show import Json
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.window import add_window, asked_window


def add(commands: Commands) -> None:
    counting = command(
        commands, "stat", _stat, "print percentiles of step times, tokens, batch and queue; hit rate, preemptions",
        "The first call folds the log to index it; later ones answer at once.",
    )  # fmt: skip
    add_window(counting)
    counting.add_argument("--by", choices=clients.GROUPS, default="", help="what clients saw, by group")
    counting.add_argument("--slo", default="", metavar="ttft=200ms,itl=50ms", help="the latency objective of a request")
    for tool in (slow, cache):
        tool.add_command(partial(command, commands))
    comparing = command(
        commands, "diff", _diff, "find the first step in which two logs differ, field by field",
        "Compares what was recorded; ignores clocks and the frames in which ranks reported.",
    )  # fmt: skip
    comparing.add_argument("other", metavar="OTHER", type=Path, help="the log to compare with")
    comparing.add_argument("--exact", action="store_true", help="compare the arrival times of requests too")
    command(
        commands, "ranks", _ranks, "check whether all ranks had the same state, or in which step and field they differed",
        "LOG is an engine's log, or a folder with one log for each rank.",
    )  # fmt: skip


def _stat(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.by:
        log, objective = open_log(arguments.log), objective_of(arguments.slo)
        answer = clients.clients(log, asked_window(log, arguments), arguments.by, objective)
        print_answer(arguments, console, answer, clients.print_clients)
        return
    if arguments.slo:
        raise UnusableLog("--slo is met by requests: say of which groups, as --by client")
    index = index_of(arguments.log)
    print_answer(arguments, console, stat(index, asked_window(index.log, arguments)), print_stat)


def _diff(arguments: argparse.Namespace, console: Console) -> int:
    answer = diff(open_log(arguments.log), open_log(arguments.other), arguments.exact)
    print_answer(arguments, console, answer, print_diff)
    return SAME if answer.same else DIFFERENT


def _ranks(arguments: argparse.Namespace, console: Console) -> int:
    answer = ranks(arguments.log)
    print_answer(arguments, console, answer, print_ranks)
    return SAME if answer.same else DIFFERENT


# ---- answers on a terminal ---------------------------------------------------------------------------------------


def print_stat(console: Console, answer: Stat) -> None:
    rows = [
        _row("step time, ms", [value / 1000 for value in answer.step_us]),
        _row("tokens computed", answer.tokens),
        _row("requests in the step", answer.batch),
        _row("running", answer.running),
        _row("waiting", answer.queue),
        _row("free blocks", answer.free_blocks),
    ]
    facts(console, counted(answer.steps, "step"), [
        ("time", f"{answer.seconds:,.1f} s at work, {answer.tokens_per_s:,.0f} tokens a second" if answer.seconds else "not told"),
        ("tokens", f"{answer.computed_tokens:,} computed, {answer.sampled_tokens:,} sampled"),
        ("prefix cache", f"{answer.hit_rate:.1%} of {answer.queried_tokens:,} tokens found"),
        ("preemptions", f"{answer.preemptions:,}, {answer.preemptions_per_1000_steps:.2f} in 1,000 steps"),
        ("requests", f"{answer.finished:,} finished, {answer.aborted:,} aborted"),
        ("size", f"{answer.size_bytes:,} bytes, {answer.bytes_per_sampled_token:.2f} per sampled token"),
        *([("counted up to", answer.stopped)] if answer.stopped else []),
    ])  # fmt: skip
    records(console, "per step", ("value", *PERCENTILE_NAMES), rows)


def _row(name: str, values: Sequence[float]) -> Json:
    reported = [f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values] or ["-"] * len(
        PERCENTILE_NAMES
    )
    return {"value": name, **dict(zip(PERCENTILE_NAMES, reported))}


def print_diff(console: Console, answer: Diff) -> None:
    if answer.headers:
        records(console, "settings that differ", ("name", "one", "other"), _fields(answer.headers))
    console.print(f"equal: {counted(answer.segments_equal, 'segment')}, then {counted(answer.frames_equal, 'frame')}")
    if answer.fields:
        where = f"{f'step {answer.step}' if answer.step >= 0 else 'before the first step'}, event {answer.event}: {answer.what}"
        records(console, f"first divergence, {where}; fields that differ", ("name", "one", "other"), _fields(answer.fields))
    console.print(_conclusion(answer), style="bold green" if answer.same else "bold red")


def _fields(fields: Sequence[Field]) -> list[Json]:
    return [{"name": field.name, "one": field.one, "other": field.other} for field in fields]


def _conclusion(answer: Diff) -> str:
    if answer.fields:
        return f"the logs diverge in step {answer.step}" if answer.step >= 0 else "the logs diverge before their first step"
    return "the logs have the same events" + (", under other settings" if answer.headers else "")


def print_ranks(console: Console, answer: Ranks) -> None:
    rows = [
        {
            "rank": line.name, "equal": f"{line.reports:,}", "last equal step": _step(line.last_equal_step),
            "first different step": _step(line.first_different_step), "fields": ", ".join(line.fields) or "-",
        }
        for line in answer.ranks
    ]  # fmt: skip
    records(console, f"compared with {answer.compared}", tuple(rows[0]), rows)
    for line in answer.ranks:
        if line.first_different_step >= 0 or line.recorded:
            console.print(_drift(line, answer.interval))
    style = "bold green" if answer.same else "bold red"
    console.print("all ranks agree" if answer.same else "the ranks have drifted apart", style=style)


def _step(step: int) -> str:
    return "-" if step < 0 else f"{step:,}"


def _drift(line: RankLine, interval: int) -> str:
    began = f"; with reports every {interval} steps, this began after step {line.last_equal_step}" if interval > 1 else ""
    if line.recorded == line.recomputed:
        whose = f" for request {', '.join(map(str, line.requests))}" if line.requests else ""
        return f"{line.name} sampled a different token than the engine{whose} before step {line.first_different_step}{began}"
    return f"{line.name} has {line.recorded} in step {line.first_different_step} where {line.recomputed} is right{began}"
