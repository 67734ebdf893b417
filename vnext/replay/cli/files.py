"""The commands that make files: redact, cut, merge, convert."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from vnext.replay.answers.convert import Converted, convert
from vnext.replay.answers.slices import Written, cut, merge, redact
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, index_of, print_answer
from vnext.replay.console.render import counted, facts
from vnext.replay.reading.source import open_log


def add(commands: Commands) -> None:
    redacting = command(
        commands, "redact", _redact, "write a log without its texts, in which every decision stays as it was",
        "Keeps lengths, shared prefixes, stops and times; forgets the key. Folds what it wrote to verify it.",
    )  # fmt: skip
    _out(redacting)
    cutting = command(
        commands, "cut", _cut, "write some steps of a log as a separate log",
        "Takes the steps from FROM up to, not including, TO, behind a snapshot of the state in which they begin.",
    )  # fmt: skip
    cutting.add_argument("first", metavar="FROM", type=int, help="the first step")
    cutting.add_argument("end", metavar="TO", type=int, nargs="?", help="the step after the last one (default: the log's end)")
    _out(cutting)
    merging = command(commands, "merge", _merge, "join slices of one run into one log", "Overlapping parts must be equal.")
    merging.add_argument("others", metavar="LOG", type=Path, nargs="+", help="the other slices, in any order")
    _out(merging)
    converting = command(
        commands, "convert", _convert, "convert the requests of a log or a file to a file or a log",
        "Formats: jsonl (everything), mooncake (lengths, times and shared prefixes), vllm-vcr (those and client latencies). "
        "LOG may be such a file, OTLP's JSON or SGLang's JSON log.",
    )  # fmt: skip
    wanted = converting.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--to", choices=("jsonl", "mooncake", "vllm-vcr"), help="write a file in this format")
    wanted.add_argument("--like", metavar="ENGINE", type=Path, help="write a log, with the engine of the log ENGINE")
    _out(converting)


def _out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="what to write; must not exist yet")


def _redact(arguments: argparse.Namespace, console: Console) -> int:
    return _written(arguments, console, redact(open_log(arguments.log), arguments.out))


def _cut(arguments: argparse.Namespace, console: Console) -> int:
    return _written(arguments, console, cut(index_of(arguments.log), arguments.out, arguments.first, arguments.end))


def _merge(arguments: argparse.Namespace, console: Console) -> int:
    parts = [open_log(path) for path in (arguments.log, *arguments.others)]
    return _written(arguments, console, merge(parts, arguments.out))


def _written(arguments: argparse.Namespace, console: Console, answer: Written) -> int:
    print_answer(arguments, console, answer, print_written)
    return SAME if answer.same else DIFFERENT


def _convert(arguments: argparse.Namespace, console: Console) -> None:
    answer = convert(arguments.log, arguments.out, arguments.to, arguments.like)
    print_answer(arguments, console, answer, print_converted)


def print_written(console: Console, answer: Written) -> None:
    facts(console, answer.log, [
        ("steps", f"{answer.first_step:,} to {answer.last_step:,}"),
        ("size", f"{answer.size_bytes:,} bytes, {counted(answer.frames, 'frame')}"),
        ("decisions", f"{answer.decisions}, folded again {answer.decisions_again}"),
    ])  # fmt: skip
    reported = "every decision is as it was" if answer.same else "what was written does not fold to the same decisions"
    console.print(reported, style="bold green" if answer.same else "bold red")


def print_converted(console: Console, answer: Converted) -> None:
    console.print(f"{counted(answer.requests, 'request')} from {answer.source} to {answer.target}: {answer.out}")
