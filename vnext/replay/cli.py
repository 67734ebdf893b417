"""vnext-replay: the commands on a log.

Owns arguments, exit codes and errors: 0 all is well, 1 a difference was found, 2 the input cannot be used. Every
command has --json. Imports no torch: a log is opened on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from vnext.replay import fork, render, render_life, shrinking, to_test, trace, watch, what_if
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
    top = argparse.ArgumentParser(
        prog="vnext-replay",
        description="Read, verify and explain the log of an engine.",
        epilog="Exit codes: 0 all is well, 1 the log differs or is damaged, 2 there is nothing to work with.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _command(
        commands, "info", _info, "what is in a log: engine, size, requests, tokens", "Counts events only."
    )
    verifying = _command(
        commands, "verify", _verify, "replay a log and compare it with what the engine did",
        "Decides every step again and compares plans, digests of states and digests of ranks, up to the first "
        "difference. A log that ends in the middle of a record (kill, power cut) is a shorter log, no difference.",
    )  # fmt: skip
    verifying.add_argument("--laws", action="store_true", help="check all laws after every event: slower")
    showing = _command(
        commands, "show", _show, "the engine's state in a step, or at the end",
        "Counts and positions of every request; positions with a + are followed by a sample.",
    )  # fmt: skip
    showing.add_argument("step", metavar="STEP", nargs="?", type=int, help="number of a step, from 0; else the end")
    request = _command(
        commands, "req", _request, "one request's life: queue, cache hits, chunks, tokens, preemptions, end",
        "Steady decoding is drawn together; --json tells every event by itself.",
    )  # fmt: skip
    request.add_argument("id", metavar="ID", type=int, help="number of the request in order of arrival, from 0")
    shrinking.add_command(partial(_command, commands))
    to_test.add_command(partial(_command, commands))
    trace.add_command(partial(_command, commands))
    fork.add_command(partial(_command, commands))
    what_if.add_command(partial(_command, commands))
    watch.add_command(partial(_command, commands))
    return top


def _command(commands, name: str, run, summary: str, more: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {more}")
    command.add_argument("log", metavar="LOG", type=Path, help="directory of a log, or one segment file")
    command.add_argument("--json", action="store_true", help="print one JSON object for programs")
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
