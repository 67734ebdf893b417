"""The commands for rollouts: rollouts, which makes a trainer's file of a log, and audit, which checks somebody else's."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from vnext.replay.answers.rollouts import Rollouts, write_rollouts
from vnext.replay.cli.exec import add_model, chosen_of, progress_of
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, print_answer
from vnext.replay.console.render import counted, facts, records
from vnext.replay.execution.audit import Audited, audit, scores_of, share_of

FIELDS = ("field", "request", "position", "step", "recorded", "found")


def add(commands: Commands) -> None:
    writing = command(
        commands, "rollouts", _rollouts, "write the finished answers of a log as a trainer's file, with one digest of them all",
        "LOG must contain texts (--log full). Further logs are those of engines that continued its requests.",
    )  # fmt: skip
    writing.add_argument("others", metavar="LOG", type=Path, nargs="*", help="logs that continue it, in order")
    writing.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="the file to write (JSONL); must not exist")
    writing.add_argument("--logprobs", action="store_true", help="with log-probabilities, which the model computes anew")
    add_model(writing)
    auditing = command(
        commands, "audit", _audit, "check somebody else's log: run random steps of it again, and name what was changed",
        "LOG must contain texts (--log full). Folds and decides the whole log again too.",
    )  # fmt: skip
    auditing.add_argument("--sample", metavar="SHARE", default="1%", help="share of the steps that run again: 1%%, 0.01 or all")
    auditing.add_argument("--seed", type=int, help="chooses the same steps again (default: random)")
    add_model(auditing)


def _rollouts(arguments: argparse.Namespace, console: Console) -> None:
    score = scores_of(arguments.log, chosen_of(arguments)) if arguments.logprobs else None
    answer = write_rollouts([arguments.log, *arguments.others], arguments.out, score)
    print_answer(arguments, console, answer, print_rollouts)


def _audit(arguments: argparse.Namespace, console: Console) -> int:
    share, chosen = share_of(arguments.sample), chosen_of(arguments)
    with progress_of("steps") as progress:
        answer = audit(arguments.log, share, arguments.seed, chosen, progress)
    print_answer(arguments, console, answer, print_audited)
    return SAME if answer.same else DIFFERENT


def print_rollouts(console: Console, answer: Rollouts) -> None:
    facts(console, answer.out, [
        ("rollouts", f"{answer.rollouts:,}, {counted(answer.tokens, 'token')} of answers"),
        ("left out", f"{answer.aborted:,} aborted, {answer.unfinished:,} unfinished, {answer.with_inputs:,} with images or sounds"),
        ("weights", ", ".join(answer.weights) or "-"),
        *([("not scored", f"{answer.not_scored:,}, drawn with weights that are not here")] if answer.not_scored else []),
        ("digest", answer.digest),
    ])  # fmt: skip
    for sentence in answer.lacking:
        console.print(f"not scored: {sentence}", style="yellow", soft_wrap=True)


def print_audited(console: Console, answer: Audited) -> None:
    facts(console, "audited", [
        ("model", answer.model or "did not run"),
        ("steps", f"{answer.steps:,} of {answer.steps_total:,} ran again, chosen by --seed {answer.seed}"),
        *([("not audited", f"{answer.not_audited:,} more, computed with weights that are not here")] if answer.not_audited else []),
        ("tokens", f"{answer.tokens:,} of {counted(answer.requests, 'request')}, {answer.differ:,} differ"),
        ("weights", "every byte was compared" if answer.every_byte else "the log has no digest of every byte"),
        ("missed", f"one changed token that no later one depends on: with probability {answer.missed:.3f}"),
        *[(f"other {ground.name}", f"{ground.here} here, {ground.there} in the log") for ground in answer.elsewhere],
    ])  # fmt: skip
    for sentence in answer.lacking:
        console.print(f"not audited: {sentence}", style="yellow", soft_wrap=True)
    for finding in answer.findings:
        console.print(finding.message, style="bold red", soft_wrap=True)
    records(console, "findings", FIELDS, [{name: getattr(each, name) for name in FIELDS} for each in answer.findings])
    verdict = counted(len(answer.findings), "finding") if answer.findings else "nothing was found"
    console.print(verdict, style="bold green" if answer.same else "bold red")
