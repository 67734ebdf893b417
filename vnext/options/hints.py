"""Hints: suggestions for an option that does not exist. Knows words only; options of other engines are in foreign.py."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from vnext.options.foreign import FOREIGN

CUTOFF = 0.82
"""The similarity of two names at which one is suggested for the other: --stream-interval must not suggest --digest-interval."""


def close_to(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str:
    """The name in `known` that `name` is a misspelling of, "" for none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def unknown_option(given: str, known: Iterable[str], command: str) -> str:
    """The sentence about an argument that `command`, with the options `known`, does not take."""
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"nothing takes {given!r}: one model is served, and options begin with two dashes."
    if foreign := FOREIGN.get(name):
        return foreign.sentence(name)
    if close := close_to(name, known):
        return f"there is no option {name}: did you mean {close}?"
    return f"there is no option {name}; `{command} --help` lists all options."


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """The sentence about a keyword that `LLM(...)`, with the keywords `known`, does not take."""
    if foreign := FOREIGN.get("--" + name.replace("_", "-")):
        return f"There is no setting {name}: {foreign.reason}; {foreign.remedy}."
    remedy = f"did you mean {close}?" if (close := close_to(name, known)) else "see vnext serve --help."
    return f"There is no setting {name}: {remedy}"
