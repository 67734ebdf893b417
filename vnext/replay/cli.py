"""vnext-replay: the commands on a log.

Owns arguments, exit codes and errors: 0 all is well, 1 a difference was found, 2 the input cannot be used. Every
command has --json. Imports no torch: a log is opened on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vnext.replay import render, render_life
from vnext.replay.info import info
from vnext.replay.life import life
from vnext.replay.show import show
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.verify import verify

SAME, DIFFERENT, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 by itself on wrong arguments."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments, terminal())
    except UnusableLog as error:
        terminal(stderr=True).print(f"vnext-replay: {error}", soft_wrap=True)
        return UNUSABLE


def terminal(stderr: bool = False) -> Console:
    """A console that prints text as it is: values from a log are no markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="vnext-replay", description="Read, verify and explain an engine's log.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "info", _info, "what is in the log, without folding it")
    verifying = _command(commands, "verify", _verify, "fold it again and compare every plan, digest and law")
    verifying.add_argument("--laws", action="store_true", help="check all laws after every event, not a few cheap ones")
    showing = _command(commands, "show", _show, "the state at a step, or at the end of the log")
    showing.add_argument("step", metavar="STEP", nargs="?", type=int, help="number of the step")
    request = _command(commands, "req", _request, "one request's life")
    request.add_argument("id", metavar="ID", type=int, help="number of the request")
    return top


def _command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("log", metavar="LOG", type=Path, help="a log directory or one segment file")
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    command.set_defaults(run=run)
    return command


def _info(arguments: argparse.Namespace, console: Console) -> int:
    answer = info(open_log(arguments.log))
    _print(arguments, console, answer, render.print_info)
    return SAME


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    answer = verify(open_log(arguments.log), arguments.laws)
    _print(arguments, console, answer, render.print_verdict)
    return SAME if answer.same else DIFFERENT


def _show(arguments: argparse.Namespace, console: Console) -> int:
    _print(arguments, console, show(open_log(arguments.log), arguments.step), render.print_shown)
    return SAME


def _request(arguments: argparse.Namespace, console: Console) -> int:
    _print(arguments, console, life(open_log(arguments.log), arguments.id), render_life.print_life)
    return SAME


def _print(arguments: argparse.Namespace, console: Console, answer, print_tables) -> None:
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_tables(console, answer)
