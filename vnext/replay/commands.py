"""What all commands share: exit codes, how a command is declared, how an answer is printed, how an index is made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from vnext.replay import render
from vnext.replay.index import Index
from vnext.replay.source import open_log

SAME, DIFFERENT, UNUSABLE = 0, 1, 2
INTERRUPTED, CUT_SHORT = 130, 141  # as shells have it: Ctrl-C, and a reader that went away; no answer is no good answer
Run = Callable[[argparse.Namespace, Console], int]


class Terminal(Console):
    """A console whose reader may go away: `vnext-replay show LOG | head` has found no difference."""

    def on_broken_pipe(self) -> NoReturn:
        try:
            super().on_broken_pipe()
        except SystemExit as ended:
            raise SystemExit(CUT_SHORT) from ended


def terminal(stderr: bool = False) -> Console:
    """A console that prints text as it is: values from a log are no markup."""
    return Terminal(stderr=stderr, highlight=False, markup=False, emoji=False)


def command(
    commands, name: str, run: Run, summary: str, more: str, *, aliases: tuple[str, ...] = (), log: bool = True
) -> argparse.ArgumentParser:
    """Declare a command; `run` gets its arguments and a console and returns the exit code."""
    described = f"{summary[0].upper()}{summary[1:]}. {more}"
    found = commands.add_parser(name, help=summary, description=described, aliases=aliases)
    if log:
        found.add_argument("log", metavar="LOG", type=Path, help="directory of a log, or one segment file")
    found.add_argument("--json", action="store_true", help="print one JSON object for programs")
    found.set_defaults(run=run)
    return found


def print_answer(arguments: argparse.Namespace, console: Console, answer, print_tables) -> None:
    """The answer as one JSON object, or for people."""
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_tables(console, answer)


def index_of(path: Path) -> Index:
    """The index of the log at a path; says on a terminal how far it is while it is made."""
    if not sys.stderr.isatty():
        return Index(open_log(path))
    from rich.progress import Progress  # where nobody looks on, nobody waits for it

    progress = Progress(console=terminal(stderr=True), transient=True)
    task = progress.add_task("indexing, once", total=None)

    def told(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()

    return Index(open_log(path), told)
