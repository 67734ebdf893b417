"""The commands that read one log: info, verify, show, req. Each imports only its own answer, and only when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console

from vnext.replay.console import render
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, index_of, print_answer
from vnext.replay.reading.source import Log, UnusableLog, open_log

if TYPE_CHECKING:
    from vnext.replay.rerun.grammars import GrammarCheck


def add(commands: Commands) -> None:
    command(
        commands, "info", _info, "summarise a log: engine, size, requests, tokens", "Counts events without folding them."
    )
    verifying = command(
        commands, "verify", _verify, "replay a log and compare it with what the engine did",
        "Decides every step again and compares plans, digests of states and digests of ranks, up to the first "
        "difference. A log that ends in the middle of a record (kill, power cut) is a shorter log, not a difference.",
    )  # fmt: skip
    verifying.add_argument("--laws", action="store_true", help="check all laws after every event (slower)")
    verifying.add_argument("--grammar", action="store_true", help="check that each token was one its grammar allowed")
    verifying.add_argument("--before", action="store_true", help="hold requests that came back to the log that LOG continues")
    verifying.add_argument(
        "--prefill", type=Path, metavar="PREFILL", action="append", help="hold blocks that came to the log of the other engine"
    )
    verifying.add_argument("--model", help="with --grammar: a folder or hub id of the model (default: the one in the log)")
    verifying.add_argument("--own-policy", action="store_true", help="import the policy that the log names, which runs its code")
    showing = command(
        commands, "show", _show, "show the engine's state in a step, or at the end",
        "Shows counts and positions of every request; a sample follows positions with a +.", aliases=("state",),
    )  # fmt: skip
    says = "number of a step, from 0, or a time, as 14:03:20 (UTC) or +12.5 (default: the end)"
    showing.add_argument("step", metavar="STEP", nargs="?", help=says)
    request = command(
        commands, "req", _request, "show one request's life: queue, cache hits, chunks, tokens, preemptions, end",
        "Summarises steady decoding; --json lists every event.",
    )  # fmt: skip
    request.add_argument("--own-policy", action="store_true", help="import the policy that the log names, which runs its code")
    request.add_argument("id", metavar="ID", help="the request's number in order of arrival, a part of its name, or its client")
    request.add_argument("--key", type=Path, help="the key that hashed the names of a log without texts (default: LOG.key)")


def _info(arguments: argparse.Namespace, console: Console) -> None:
    from vnext.replay.reading.info import info

    print_answer(arguments, console, info(open_log(arguments.log)), render.print_info)


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from vnext.replay.reading.verify import verify

    log = open_log(arguments.log)
    also = _grammar_check(log, arguments.model) if arguments.grammar else None
    answer = verify(log, arguments.laws, arguments.own_policy, also)
    if also is not None:
        answer = replace(answer, constrained_requests=also.requests, constrained_tokens=also.tokens)
    if arguments.before:
        from vnext.replay.reading.continued import continued

        found = continued(log)
        answer = replace(answer, continued=found, same=answer.same and not found.difference)
    if arguments.prefill is not None:
        from vnext.replay.reading.handed_over import handed_over_by

        came = handed_over_by([open_log(path) for path in arguments.prefill], log)
        answer = replace(answer, handed_over=came, same=answer.same and not came.difference)
    print_answer(arguments, console, answer, render.print_verdict)
    return SAME if answer.same else DIFFERENT


def _grammar_check(log: Log, model: str | None) -> GrammarCheck:
    """Raises UnusableLog."""
    from vnext.replay.rerun.grammars import GrammarCheck
    from vnext.replay.rerun.model_of_log import folder_of
    from vnext.replay.rerun.numerics import CannotRun

    if log.header.privacy == "shape":
        raise UnusableLog("a log without texts holds no grammars: record with --log full to check them")
    try:
        return GrammarCheck(folder_of(log.header.started, model), log.header.started.config)
    except CannotRun as error:
        raise UnusableLog(str(error)) from error


def _show(arguments: argparse.Namespace, console: Console) -> None:
    from vnext.replay.reading.show import show

    print_answer(arguments, console, show(index_of(arguments.log), arguments.step), render.print_shown)


def _request(arguments: argparse.Namespace, console: Console) -> None:
    from vnext.replay.answers import render_request_life
    from vnext.replay.answers.request_life import life
    from vnext.replay.reading.naming import request_of

    index = index_of(arguments.log)
    answer = life(index, request_of(index.log, arguments.id, arguments.key), arguments.own_policy)
    print_answer(arguments, console, answer, render_request_life.print_life)
