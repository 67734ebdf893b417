"""Misuse: rewrites argparse's error messages, for programs whose options argparse converts and checks.

An unknown message passes unchanged. Knows words only.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable

KINDS = {"int": "a whole number", "float": "a number"}
PATTERNS = (
    (r"argument (?P<name>.+?): expected .*argument.*", "{name} needs a value after it"),
    (r"argument (?P<name>.+?): ignored explicit argument .*", "{name} takes no value"),
    (r"argument (?P<name>.+?): invalid choice: (?P<value>.+?) \(choose from (?P<rest>.+)\)", "{name} is {value}: choose {rest}"),
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
    for pattern, sentence in PATTERNS:
        if match := re.fullmatch(pattern, message, re.DOTALL):
            return sentence.format(**match.groupdict()) + "."
    return message


def _unknown(given: str, known: Iterable[str]) -> str:
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"nothing takes {given!r}."
    close = difflib.get_close_matches(name, known, n=1)
    return f"there is no option {name}" + (f": did you mean {close[0]}?" if close else ".")


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a parser and of its commands."""
    found = {flag for action in parser._actions for flag in action.option_strings}
    commands = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return found.union(*(_flags(command) for choices in commands for command in choices.values()))
