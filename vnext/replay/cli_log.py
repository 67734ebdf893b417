"""The commands that read one log: info, verify, show, req. Each imports what answers it when it runs, and no other's."""

from __future__ import annotations

import argparse

from rich.console import Console

from vnext.replay import render
from vnext.replay.commands import DIFFERENT, SAME, command, index_of, print_answer
from vnext.replay.source import open_log


def add(commands) -> None:
    """Declare them."""
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


def _info(arguments: argparse.Namespace, console: Console) -> int:
    from vnext.replay.info import info

    print_answer(arguments, console, info(open_log(arguments.log)), render.print_info)
    return SAME


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from vnext.replay.verify import verify

    answer = verify(open_log(arguments.log), arguments.laws, arguments.own_policy)
    print_answer(arguments, console, answer, render.print_verdict)
    return SAME if answer.same else DIFFERENT


def _show(arguments: argparse.Namespace, console: Console) -> int:
    from vnext.replay.show import show

    print_answer(arguments, console, show(index_of(arguments.log), arguments.step), render.print_shown)
    return SAME


def _request(arguments: argparse.Namespace, console: Console) -> int:
    from vnext.replay import render_life
    from vnext.replay.life import life

    answer = life(index_of(arguments.log), arguments.id, arguments.own_policy)
    print_answer(arguments, console, answer, render_life.print_life)
    return SAME
