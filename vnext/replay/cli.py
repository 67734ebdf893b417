"""vnext-replay: the commands on a log.

Owns arguments, exit codes and errors: 0 all is well, 1 a difference was found, 2 the input cannot be used. Every
command has --json. Imports no torch: a log is opened on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from vnext.replay import cli_compare, cli_files, cli_ui, fork, render, render_life, shrinking, to_test, trace, watch, what_if
from vnext.replay.commands import DIFFERENT, SAME, UNUSABLE, command, index_of, print_answer, terminal
from vnext.replay.info import info
from vnext.replay.life import life
from vnext.replay.show import show
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.verify import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 by itself on wrong arguments."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments, terminal())
    except UnusableLog as error:
        terminal(stderr=True).print(f"vnext-replay: {error}", soft_wrap=True)
        return UNUSABLE
    except MemoryError:
        terminal(stderr=True).print("vnext-replay: there is not enough memory for this log", soft_wrap=True)
        return UNUSABLE


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="vnext-replay",
        description="Read, verify and explain the log of an engine.",
        epilog="Exit codes: 0 all is well, 1 the log differs or is damaged, 2 there is nothing to work with.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    command(
        commands, "info", _info, "what is in a log: engine, size, requests, tokens", "Counts events only."
    )
    verifying = command(
        commands, "verify", _verify, "replay a log and compare it with what the engine did",
        "Decides every step again and compares plans, digests of states and digests of ranks, up to the first "
        "difference. A log that ends in the middle of a record (kill, power cut) is a shorter log, no difference.",
    )  # fmt: skip
    verifying.add_argument("--laws", action="store_true", help="check all laws after every event: slower")
    verifying.add_argument("--own-policy", action="store_true", help="import the policy that the log names: runs its code")
    showing = command(
        commands, "show", _show, "the engine's state in a step, or at the end",
        "Counts and positions of every request; positions with a + are followed by a sample.", aliases=("state",),
    )  # fmt: skip
    showing.add_argument("step", metavar="STEP", nargs="?", type=int, help="number of a step, from 0; else the end")
    request = command(
        commands, "req", _request, "one request's life: queue, cache hits, chunks, tokens, preemptions, end",
        "Steady decoding is drawn together; --json tells every event by itself.",
    )  # fmt: skip
    request.add_argument("--own-policy", action="store_true", help="import the policy that the log names: runs its code")
    request.add_argument("id", metavar="ID", type=int, help="number of the request in order of arrival, from 0")
    cli_compare.add(commands)
    cli_files.add(commands)
    cli_ui.add(commands)
    for tool in (shrinking, to_test, trace, fork, what_if, watch):
        tool.add_command(partial(command, commands))
    return top


def _info(arguments: argparse.Namespace, console: Console) -> int:
    answer = info(open_log(arguments.log))
    print_answer(arguments, console, answer, render.print_info)
    return SAME


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    answer = verify(open_log(arguments.log), arguments.laws, arguments.own_policy)
    print_answer(arguments, console, answer, render.print_verdict)
    return SAME if answer.same else DIFFERENT


def _show(arguments: argparse.Namespace, console: Console) -> int:
    print_answer(arguments, console, show(index_of(arguments.log), arguments.step), render.print_shown)
    return SAME


def _request(arguments: argparse.Namespace, console: Console) -> int:
    answer = life(index_of(arguments.log), arguments.id, arguments.own_policy)
    print_answer(arguments, console, answer, render_life.print_life)
    return SAME
