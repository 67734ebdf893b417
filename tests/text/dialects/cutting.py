"""Texts cut into pieces, and the parts that a parser makes of them, joined."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from vnext.server.answers.parts import joined
from vnext.text.dialects.dialect import Dialect, Tools
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words


def parts_of(dialect: Dialect, pieces: Sequence[str], tools: Tools, *, holds: bool = False, cut: bool = False) -> list[Part]:
    """The parts of a text in these pieces."""
    parser, found = dialect.parser(tools, holds), []
    for piece in pieces:
        found += parser.push(piece)
    found += parser.finish(cut)
    text = "".join(pieces)
    assert all(text.startswith(part.text, part.start) for part in found if isinstance(part, Words))
    return joined(found)


def cuttings(text: str, count: int = 200) -> Iterator[list[str]]:
    """A text whole, one character at a time, in every two pieces, and in three pieces: all of a short text, some of a long one."""
    yield [text]
    yield list(text)
    size = len(text)
    yield from ([text[:place], text[place:]] for place in range(size))
    pairs = [(first, second) for second in range(size) for first in range(second)]
    for first, second in pairs if len(pairs) <= count else random.Random(size).sample(pairs, count):
        yield [text[:first], text[first:second], text[second:]]


def shown(parts: Sequence[Part]) -> list[object]:
    """Words as texts, calls as (name, arguments) or (name, arguments, id); a call that broke off ends with None."""
    found: list[object] = []
    for part in parts:
        match part:
            case Words(text):
                found.append(text)
            case Reasoning(text):
                found.append(("reasoning", text))
            case CallBegun(_, name, id_):
                found.append((name, "", id_, None) if id_ else (name, "", None))
            case CallArguments(_, text):
                found[-1] = (found[-1][0], found[-1][1] + text, *found[-1][2:])
            case CallEnded(_):
                found[-1] = found[-1][:-1]
    return found
