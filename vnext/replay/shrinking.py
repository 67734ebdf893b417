"""shrink: the smallest story that still breaks a law, or of which a predicate is still true.

Owns the command: what is looked for, what is written, how it is told. The search itself is vnext/sched/sim/shrink.py's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.replay import render
from vnext.replay.retold import Predicate, events_of, failing, judged, predicate_of, voice_of
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.sched.sim.judge import Finding, failing_like, told
from vnext.sched.sim.log import segment
from vnext.sched.sim.shrink import shrink
from vnext.state.events import AnyEvent
from vnext.state.log import SEGMENT_SUFFIX, segment_name
from vnext.version import __version__

FOLDED_MAX = 40_000
"""Events of all candidates together: what bounds the time."""


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is the law's name, "predicate", or the words of another failure; "" if nothing is wrong. `events_before`
    counts the log's, `events` those that are left; `lines` tells them. `written` is the new log, "" if there is none."""

    kind: str
    message: str
    events_before: int
    events: int
    lines: list[str]
    written: str


def shrink_log(
    log: Log, law: str = "", predicate: Predicate | None = None, folded_max: int = FOLDED_MAX, own_policy: bool = False
) -> tuple[Shrunk, tuple[AnyEvent, ...]]:
    """The smallest failing events of a log, and what they are. UnusableLog if it breaks another law than `law`."""
    events = events_of(log, own_policy)
    if predicate is not None:
        found, toy = _predicated(events, predicate), False
    else:
        found, toy = judged(events)
    if found is None:
        return Shrunk(kind="", message="", events_before=len(events), events=0, lines=[], written=""), ()
    if law and found.kind != law:
        raise UnusableLog(f"the log does not break {law} first, but fails with {found.message} at event {found.length - 1}")
    failure = failing(predicate) if predicate is not None else failing_like(found.kind, toy)
    small = shrink(events[: found.length], failure, voice_of(events[: found.length], toy), folded_max)
    shrunk = Shrunk(
        kind=found.kind, message=found.message, events_before=len(events), events=len(small), lines=told(small), written=""
    )
    return shrunk, small


def _predicated(events: Sequence[AnyEvent], predicate: Predicate) -> Finding | None:
    length = failing(predicate)(events)
    return None if length is None else Finding("predicate", f"the predicate holds after event {length - 1}", length)


def write_log(events: Sequence[AnyEvent], out: Path) -> Path:
    """A log of these events: a segment file if `out` is named like one, else a directory. UnusableLog if it is there."""
    path = out if out.suffix == SEGMENT_SUFFIX else out / segment_name(0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(segment(events, __version__))
    except FileExistsError as error:
        raise UnusableLog(f"{path} is there already: give another place with -o") from error
    except OSError as error:
        raise UnusableLog(f"{path} cannot be written ({error}): give another place with -o") from error
    return path


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`shrink` among the commands."""
    shrinking = command(
        "shrink", run, "the smallest log that still breaks a law or a predicate",
        "Leaves out requests and events and asks for less, as long as the same law breaks; every decision is made anew. "
        "Exit code 1: something is wrong, and was made small.",
    )  # fmt: skip
    shrinking.add_argument("--law", default="", help="break this law (M1, S3, ...); else whatever breaks first")
    shrinking.add_argument(
        "--predicate", metavar="FILE:FUNC", help="not the laws: FUNC(before, event, after) is true where something is wrong"
    )
    shrinking.add_argument("--own-policy", action="store_true", help="import the policy that the log names: runs its code")
    shrinking.add_argument("-o", "--out", type=Path, help="write the small log here: a directory, or one *.vnextlog file")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 nothing is wrong, 1 made small."""
    predicate = predicate_of(arguments.predicate) if arguments.predicate else None
    answer, small = shrink_log(open_log(arguments.log), arguments.law, predicate, own_policy=arguments.own_policy)
    if small and arguments.out:
        answer = msgspec.structs.replace(answer, written=str(write_log(small, arguments.out)))
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_shrunk(console, answer)
    return int(bool(small))


def print_shrunk(console: Console, answer: Shrunk) -> None:
    """What is left, one line for each event."""
    if not answer.kind:
        console.print(f"nothing is wrong: {render.counted(answer.events_before, 'event')} keep every law", style="bold green")
        return
    console.print(render.printable(answer.message), style="bold red", soft_wrap=True)
    console.print(f"{answer.events:,} of {render.counted(answer.events_before, 'event')} are left")
    for line in answer.lines:
        console.print(render.printable(line), soft_wrap=True)
    if answer.written:
        console.print(f"written: {answer.written}", soft_wrap=True)
