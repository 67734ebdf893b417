"""shrink: the smallest list of events that still breaks a law, or for which a predicate is still true.

Owns the command: what to look for, what to write, how to present it. vnext/sim/shrink.py owns the search.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.log.codec import SEGMENT_SUFFIX, segment_name
from vnext.replay.console import render
from vnext.replay.console.commands import print_answer
from vnext.replay.futures.redecided import (
    Predicate,
    checked_events,
    events_of,
    failing,
    held_at,
    predicate_of,
    recorded_events,
    voice_of,
)
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.verify import verify
from vnext.sim.findings import Finding, failing_like, reported, segment
from vnext.sim.shrink import shrink
from vnext.state.events import AnyEvent

FOLDED_MAX = 40_000
"""Events of all candidates together; bounds the time."""

LAW = re.compile(r"[A-Z]\d{1,2}")


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is the law's name, "predicate", or the wording of another failure; "" if nothing is wrong. `events_before`
    counts the log's events, `events` the remaining ones; `lines` lists them. `written` is the new log, "" if there
    is none. `revived` requests were alive where a log without its beginning starts, and arrived anew.
    """

    kind: str
    message: str
    events_before: int
    events: int
    lines: list[str]
    written: str
    revived: int = 0


def shrink_log(
    log: Log, law: str = "", predicate: Predicate | None = None, own_policy: bool = False
) -> tuple[Shrunk, tuple[AnyEvent, ...]]:
    """The smallest failing events of a log, with their description. Raises UnusableLog if it breaks another law than
    `law`."""
    events = events_of(log, own_policy)
    if predicate is not None:
        found, toy = _predicated(events, predicate), False
    else:
        found, toy = checked_events(events)
    lived = len(first_state(log).requests) if log.header.index else 0
    if found is None:
        _require_well(log, predicate, own_policy)
        return Shrunk(kind="", message="", events_before=len(events), events=0, lines=[], written="", revived=lived), ()
    if law and found.kind != law:
        raise UnusableLog(f"the log does not break {law} first, but fails with {found.message} at event {found.length - 1}")
    failure = failing(predicate) if predicate is not None else failing_like(found.kind, toy)
    small = shrink(events[: found.length], failure, voice_of(events[: found.length], toy), FOLDED_MAX)
    shrunk = Shrunk(
        kind=found.kind,
        message=found.message,
        events_before=len(events),
        events=len(small),
        lines=reported(small),
        written="",
        revived=lived,
    )
    return shrunk, small


def _require_well(log: Log, predicate: Predicate | None, own_policy: bool) -> None:
    """Raises UnusableLog if a log without its beginning fails, but its re-decided events do not."""
    if not log.header.index:
        return
    if predicate is not None:
        place = held_at(predicate, first_state(log), tuple(recorded_events(log)))
        failure = "" if place is None else f"the predicate holds after event {log.header.first_event + place}"
    else:
        difference = verify(log, all_laws=True, own_policy=own_policy).difference
        failure = "" if difference is None else difference.message
    if failure:
        raise UnusableLog(
            f"{failure}, but not when the requests that live where {log.paths[0]} begins come anew: what it takes lies before that"
        )


def _predicated(events: Sequence[AnyEvent], predicate: Predicate) -> Finding | None:
    length = failing(predicate)(events)
    return None if length is None else Finding("predicate", f"the predicate holds after event {length - 1}", length)


def write_log(events: Sequence[AnyEvent], out: Path) -> Path:
    """A log of these events: a segment file if `out` is named like one, else a directory. Raises UnusableLog if it
    exists."""
    path = out if out.suffix == SEGMENT_SUFFIX else out / segment_name(0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(segment(events, __version__))
    except FileExistsError as error:
        raise UnusableLog(f"{path} is there already: give another place with -o") from error
    except OSError as error:
        raise UnusableLog(f"{path} cannot be written ({reason(error)}): give another place with -o") from error
    return path


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    shrinking = command(
        "shrink", run, "find the smallest log that still breaks a law or a predicate",
        "Leaves out requests and events and shortens requests as long as the same law breaks; decides every step again. "
        "Exit code 1: the log fails, and is now small.",
    )  # fmt: skip
    shrinking.add_argument("--law", default="", help="the law to break (M1, S3, ...); by default the first that breaks")
    shrinking.add_argument(
        "--predicate", metavar="FILE:FUNC", help="in place of the laws: FUNC(before, event, after) is true on a failure"
    )
    shrinking.add_argument("--own-policy", action="store_true", help="import the policy that the log names, which runs its code")
    shrinking.add_argument("-o", "--out", type=Path, help="where to write the small log: a directory, or one *.vnextlog file")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if nothing is wrong, 1 if a failure was made small."""
    predicate = predicate_of(arguments.predicate) if arguments.predicate else None
    if arguments.law and not LAW.fullmatch(arguments.law):
        raise UnusableLog(f"--law {arguments.law}: there is no such law: docs/laws.md lists them, as M1 or S3")
    answer, small = shrink_log(open_log(arguments.log), arguments.law, predicate, own_policy=arguments.own_policy)
    if small and arguments.out:
        answer = msgspec.structs.replace(answer, written=str(write_log(small, arguments.out)))
    print_answer(arguments, console, answer, print_shrunk)
    return int(bool(small))


def print_shrunk(console: Console, answer: Shrunk) -> None:
    """Print the remaining events, one line each."""
    if answer.revived:
        lived = render.counted(answer.revived, "request")
        reported_anew = f"the log begins in mid-run: {lived} that lived there come anew, their tokens so far as prompts"
        console.print(reported_anew, style="dim", soft_wrap=True)
    if not answer.kind:
        console.print(f"nothing is wrong: {render.counted(answer.events_before, 'event')} keep every law", style="bold green")
        return
    console.print(render.printable(answer.message), style="bold red", soft_wrap=True)
    console.print(f"{answer.events:,} of {render.counted(answer.events_before, 'event')} are left")
    for line in answer.lines:
        console.print(render.printable(line), soft_wrap=True)
    if answer.written:
        console.print(f"written: {answer.written}", soft_wrap=True)
