"""to-test: a small log as a pytest file that needs nothing but vnext.

Owns the text of that file: events as literals that a person can read and change, what the model answered, and one test.
The test fails as long as the engine breaks the law (or the predicate is true) on these events, and passes after the
fix. Plans are decided anew and samples drawn anew, so the events stay legal whatever the engine decides by then.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.replay.console import render
from vnext.replay.console.commands import print_answer, writing
from vnext.replay.futures.redecided import Predicate, answers_of, events_of, finding, is_toy, predicate_of, strange_places
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.sim.findings import Finding, reported
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, generated_by, unpack_tokens
from vnext.state.params import Sampling

EVENTS_MAX = 400
"""A longer list of events is unreadable."""
HEADER_WIDTH = 110
HEADER_LETTERS_MAX = 400


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` and `message` say how the test fails today; both are empty if it passes."""

    path: str
    events: int
    kind: str
    message: str


def file_text(events: Sequence[AnyEvent], predicate: Predicate | None = None) -> tuple[str, Finding | None]:
    """The text of the file, and how its test fails today; None if it passes.

    Requests must be named by their numbers (`events_of`).
    """
    answers: dict[str, list[int]] | None = answers_of(events)
    strange = strange_places(events)
    found = finding(events, answers, strange, predicate)
    if found is None and predicate is None and is_toy(events):
        found = finding(events, None, strange)
        answers = answers if found is None else None
    return _text(events, answers, strange, found, predicate), found


def _text(
    events: Sequence[AnyEvent],
    answers: dict[str, list[int]] | None,
    strange: tuple[int, ...],
    found: Finding | None,
    predicate: Predicate | None,
) -> str:
    own = textwrap.dedent(inspect.getsource(predicate)) if predicate is not None else ""
    asked = f", predicate={predicate.__name__}" if predicate is not None else ""
    parts = [
        _header(events, found) + "\n",
        "from __future__ import annotations\n",
        _imports(events, predicate is not None) + "\n",
        "EVENTS = (\n" + "".join(_lines(events)) + ")",
        _constants(answers, strange) + "\n\n",
        own + "\n\n" if own else "",
        f"def test_{_name(found)}() -> None:\n    found = finding(EVENTS, ANSWERS, STRANGE{asked})\n"
        "    assert found is None, found.message\n",
    ]
    return "\n".join(part for part in parts if part)


def _imports(events: Sequence[AnyEvent], predicate: bool) -> str:
    """The imports for the literals, and every name that a predicate is likely to use."""
    names = {type(event).__name__ for event in events}
    if names & {"RequestArrived", "RequestResumed", "StepCommitted"}:
        names.add("pack_tokens")
    speculates = any(isinstance(event, EngineStarted) and event.config.speculation for event in events)
    config = f"from vnext.state.config import SchedulerConfig{', Speculation' * speculates}"
    lines = ["from vnext.replay.futures.redecided import finding", config]
    if predicate:
        names |= {"AnyEvent", "PrefixCacheReset", "RequestAborted", "RequestArrived", "StepCommitted", "StepPlanned"}
    lines.append("from vnext.state.events import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")")
    if names & {"RequestArrived", "RequestResumed"}:
        is_bound = any(isinstance(event, RequestArrived) and event.sampling.constraint is not None for event in events)
        lines.append(f"from vnext.state.params import {'Constraint, ' * is_bound}Sampling")
    if predicate:
        lines.append("from vnext.state.state import State")
    return "\n".join(lines)


def _constants(answers: dict[str, list[int]] | None, strange: tuple[int, ...]) -> str:
    told_to = "ANSWERS = None  # the simulator's toy model answers" if answers is None else _answers(answers)
    return f"{told_to}\nSTRANGE = {strange!r}  # plans that the scheduler would not have made"


def _answers(answers: dict[str, list[int]]) -> str:
    lines = "".join(f'    "{name}": {tokens!r},\n' for name, tokens in sorted(answers.items(), key=lambda item: int(item[0])))
    return "ANSWERS = {  # what each request was told\n" + lines + "}" if lines else "ANSWERS = {}  # nobody was told anything"


def _lines(events: Sequence[AnyEvent]) -> list[str]:
    """One literal per line; after a plan, a comment with what it computes."""
    lines = []
    for event, line in zip(events, reported(events)):
        note = re.sub(r"^ *\d+ +step \d+ is planned: ", "", line)
        note = f"  # {note}" if note != line and "<-" not in note else ""
        lines.append(f"    {literal(event)},{render.printable(note)}\n")
    return lines


def literal(event: AnyEvent) -> str:
    """An event as the Python expression that makes it, without default values."""
    match event:
        case RequestArrived():
            special = {"prompt": _packed(event.prompt), "sampling": _struct(event.sampling, Sampling, {})}
            special["generated"] = _packed(generated_by(event))
        case StepCommitted():
            special = {"tokens": _packed(event.tokens)}
        case _:
            special = {}
    return _struct(event, type(event), special)


def _struct(value: msgspec.Struct, kind: type[msgspec.Struct], special: dict[str, str]) -> str:
    parts = []
    for field in msgspec.structs.fields(kind):
        found = getattr(value, field.name)
        if field.default is msgspec.NODEFAULT or found != field.default:
            inner = _struct(found, type(found), {}) if isinstance(found, msgspec.Struct) else repr(found)
            parts.append(f"{field.name}={special.get(field.name, inner)}")
    return f"{kind.__name__}({', '.join(parts)})"


def _packed(data: bytes) -> str:
    return f"pack_tokens({unpack_tokens(data).tolist()})" if len(data) % 4 == 0 else repr(data)


def _name(found: Finding | None) -> str:
    kind = found.kind if found is not None else "every law is kept"
    words = re.sub(r"\W+", "_", f"law {kind}" if re.fullmatch(r"[A-Z]\d", kind) else kind)
    return words.strip("_").lower()[:60]


def _header(events: Sequence[AnyEvent], found: Finding | None) -> str:
    why = found.message if found is not None else "it kept every law when this file was written"
    plain = render.printable(f"A story of {len(events)} events: {why}").replace("\\", "/").replace('"', "'")
    lines = textwrap.wrap(textwrap.shorten(plain, HEADER_LETTERS_MAX), HEADER_WIDTH)
    return "\n".join(['"""' + lines[0], *lines[1:], "", "Written by `vnext-replay to-test`.", '"""'])


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    testing = command(
        "to-test", run, "write a pytest file from a small log, which fails before the fix and passes after it",
        "The file holds the events as literals and needs only vnext. Exit code 1: the file is written, and its test passes today.",
    )  # fmt: skip
    testing.add_argument("-o", "--out", type=Path, required=True, help="the file to write: test_*.py")
    testing.add_argument("--own-policy", action="store_true", help="import the policy that the log names, which runs its code")
    testing.add_argument("--predicate", metavar="FILE:FUNC", help="the predicate given to `shrink`; the file includes it")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if the file is written and its test fails today, 1 if the test passes."""
    events = events_of(open_log(arguments.log), arguments.own_policy)
    if len(events) > EVENTS_MAX:
        raise UnusableLog(f"{len(events)} events are no story: `vnext-replay shrink` makes at most {EVENTS_MAX} of them")
    text, found = file_text(events, predicate_of(arguments.predicate) if arguments.predicate else None)
    with writing(arguments.out), arguments.out.open("x") as file:
        file.write(text)
    kind, message = (found.kind, found.message) if found is not None else ("", "")
    answer = Written(path=str(arguments.out), events=len(events), kind=kind, message=message)
    print_answer(arguments, console, answer, print_written)
    return int(found is None)


def print_written(console: Console, answer: Written) -> None:
    """Print where the file is, and what its test does today."""
    today = f"it fails today: {answer.message}" if answer.kind else "its test passes today: nothing is wrong with this story"
    console.print(f"written: {answer.path}, {render.counted(answer.events, 'event')}", style="bold", soft_wrap=True)
    console.print(render.printable(today), soft_wrap=True)
