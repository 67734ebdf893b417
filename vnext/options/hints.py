"""Hints: suggestions for an option that does not exist. Knows words only; options of other engines are in foreign.py."""

from __future__ import annotations

from collections.abc import Iterable

from vnext.base.spelling import close_to
from vnext.options.foreign import FOREIGN


def unknown_option(given: str, known: Iterable[str], command: str) -> str:
    """The sentence about an argument that `command`, with the options `known`, does not take."""
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"nothing takes {given!r}: models stand side by side, and options begin with two dashes."
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
