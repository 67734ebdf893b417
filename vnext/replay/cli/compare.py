"""The commands that measure and compare: stat, slow, cache, diff, ranks."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from rich.console import Console

from vnext.replay.answers import cache, clients, render_compare, slow
from vnext.replay.answers.diff import diff
from vnext.replay.answers.ranks import ranks
from vnext.replay.answers.stat import stat
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, index_of, print_answer
from vnext.replay.reading.objective import objective_of
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.window import add_window, asked_window


def add(commands: Commands) -> None:
    """Declare these commands."""
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


def _stat(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.by:
        log, objective = open_log(arguments.log), objective_of(arguments.slo)
        answer = clients.clients(log, asked_window(log, arguments), arguments.by, objective)
        print_answer(arguments, console, answer, clients.print_clients)
        return SAME
    if arguments.slo:
        raise UnusableLog("--slo is met by requests: say of which groups, as --by client")
    index = index_of(arguments.log)
    print_answer(arguments, console, stat(index, asked_window(index.log, arguments)), render_compare.print_stat)
    return SAME


def _diff(arguments: argparse.Namespace, console: Console) -> int:
    answer = diff(open_log(arguments.log), open_log(arguments.other), arguments.exact)
    print_answer(arguments, console, answer, render_compare.print_diff)
    return SAME if answer.same else DIFFERENT


def _ranks(arguments: argparse.Namespace, console: Console) -> int:
    answer = ranks(arguments.log)
    print_answer(arguments, console, answer, render_compare.print_ranks)
    return SAME if answer.same else DIFFERENT
