"""vnext-replay: the commands on a log.

Owns errors, exit codes, and which module declares which command. Exit codes: 0 all is well; 1 a difference was found,
or the log is damaged, whatever was asked; 2 the input cannot be used; 130 Ctrl-C. Every command has --json. Only the
module of the requested command is imported, and all of them for --help. Imports no torch except when exec, bisect or
audit run, so a log can be opened on any machine.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from vnext.base.spelling import close_to
from vnext.base.version import __version__
from vnext.replay.console.commands import DIFFERENT, INTERRUPTED, SAME, UNUSABLE, command, how_ended, print_ended, terminal
from vnext.replay.reading.source import UnusableLog
from vnext.runtime.processes.inherited import open_standard_streams

MODULES = {
    "cli.log": ("info", "verify", "show", "state", "req"),
    "cli.compare": ("stat", "slow", "cache", "diff", "ranks"),
    "cli.exec": ("exec", "profile", "bisect"),
    "cli.audit": ("rollouts", "audit"),
    "cli.files": ("redact", "cut", "merge", "convert"),
    "cli.ui": ("ui",),
    "futures.shrinking": ("shrink",),
    "futures.to_test": ("to-test",),
    "causes.explain": ("explain",),
    "answers.clients": ("clients",),
    "answers.cost": ("cost",),
    "answers.trace": ("trace",),
    "tables.export": ("export",),
    "tables.compare": ("compare",),
    "tables.report": ("report",),
    "tables.fleet": ("fleet",),
    "futures.fork": ("fork",),
    "futures.what_if": ("what-if",),
    "futures.gate": ("gate",),
    "answers.watch": ("watch",),
    "answers.routing": ("route",),
}
"""The module that declares each command, in the order of --help."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def process() -> int:
    """Run `main` in a dedicated process: imported objects live until exit, so the garbage collector skips them and
    nothing is torn down at the end. No process that a command starts runs a file of the working directory."""
    os.environ["PYTHONSAFEPATH"] = "1"
    open_standard_streams()
    gc.freeze()
    code = main()
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse itself exits with 2 on wrong arguments."""
    given = sys.argv[1:] if argv is None else argv
    try:
        return _answered(parser(next(iter(given), "")).parse_args(given))
    except KeyboardInterrupt:
        terminal(stderr=True).print("vnext-replay: interrupted")
        return INTERRUPTED


def _answered(arguments: argparse.Namespace) -> int:
    try:
        code = arguments.run(arguments, terminal())
        return code or (SAME if arguments.ended.is_sound else DIFFERENT)
    except UnusableLog as error:
        terminal(stderr=True).print(f"vnext-replay: {error}", soft_wrap=True)
        return _refused(arguments)
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        print(f"vnext-replay: the output cannot be written ({error.strerror})", file=sys.stderr)
        return UNUSABLE
    except MemoryError:
        terminal(stderr=True).print("vnext-replay: there is not enough memory for this log", soft_wrap=True)
        return UNUSABLE


def _refused(arguments: argparse.Namespace) -> int:
    """The exit code for a rejected input. Reports a damaged log as damaged even if nothing else can be answered."""
    try:
        found = how_ended(arguments)
    except UnusableLog:
        return UNUSABLE
    if found.is_sound:
        return UNUSABLE
    print_ended(terminal(stderr=True), found)
    return DIFFERENT


class Parser(argparse.ArgumentParser):
    """Reports an error in one sentence; prints the usage only on request."""

    command = ""

    def error(self, message: str) -> NoReturn:
        program = f"{self.prog} {self.command}".rstrip()
        self.exit(UNUSABLE, f"{program}: {in_our_words(message, self)}\nSee {program} --help.\n")


def parser(asked: str = "") -> argparse.ArgumentParser:
    """The command line with the command `asked` and the others of its module, or with all commands if there is no such
    command."""
    named = Parser(
        prog="vnext-replay",
        description="Read, verify and explain the log of an engine.",
        epilog="Exit codes: 0 all is well, 1 the log differs or is damaged, 2 there is nothing to work with.",
    )
    named.command = asked if any(asked in declared for declared in MODULES.values()) else ""
    top: argparse.ArgumentParser = named
    top.add_argument("--version", action="version", version=f"vnext-replay {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in [name for name, declared in MODULES.items() if asked in declared] or MODULES:
        found = import_module(f"vnext.replay.{module}")
        if hasattr(found, "add"):
            found.add(commands)
        else:
            found.add_command(partial(command, commands))
    return top


# ---- argparse's messages in our words ----------------------------------------------------------------------------
# Misuse: rewrites argparse's error messages, for programs whose options argparse converts and checks.
#
# An unknown message passes unchanged. Knows words only.


CHOICE_CUTOFF = 0.7
"""Of choices, which are few and shorter than options."""
KINDS = {"int": "a whole number", "float": "a number"}
PATTERNS = (
    (r"argument (?P<name>.+?): expected .*argument.*", "{name} needs a value after it"),
    (r"argument (?P<name>.+?): ignored explicit argument .*", "{name} takes no value"),
    (r"argument (?P<name>.+?): not allowed with argument (?P<rest>.+)", "{name} and {rest}: leave one of the two out"),
    (r"one of the arguments (?P<rest>.+) is required", "give one of {rest}"),
    (r"the following arguments are required: (?P<rest>.+)", "{rest} is missing"),
    (r"ambiguous option: (?P<value>.+?) could match (?P<rest>.+)", "{value} may be {rest}: write it out"),
    (r"argument (?P<name>[^:]+): (?P<rest>.+?)\.?", "{name}: {rest}"),  # a check of the program's own
)


def in_our_words(message: str, parser: argparse.ArgumentParser) -> str:
    """The sentence for argparse's message about an argument that `parser` or one of its commands cannot take."""
    if match := re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL):
        return _unknown(match[1], _flags(parser))
    if match := re.fullmatch(r"argument (.+?): invalid (\w+) value: (.+)", message, re.DOTALL):
        return f"{match[1]} is {match[3]}: it must be {KINDS.get(match[2], 'another value')}."
    if match := re.fullmatch(r"argument (.+?): invalid choice: (.+?) \(choose from (.+)\)", message, re.DOTALL):
        close = close_to(match[2].strip("'"), re.findall(r"'([^']+)'", match[3]), cutoff=CHOICE_CUTOFF)
        return f"{match[1]} is {match[2]}: " + (f"did you mean {close}?" if close else f"choose {match[3]}.")
    for pattern, sentence in PATTERNS:
        if match := re.fullmatch(pattern, message, re.DOTALL):
            return sentence.format(**match.groupdict()) + "."
    return message


def _unknown(given: str, known: Iterable[str]) -> str:
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"nothing takes {given!r}."
    close = close_to(name, known)
    return f"there is no option {name}" + (f": did you mean {close}?" if close else ".")


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    commands = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return found.union(*(_flags(command) for choices in commands for command in choices.values()))
