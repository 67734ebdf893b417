"""Parts: what an answer's text consists of, in the order in which the model writes it.

A dialect's parser turns text into parts; each API renders them in its own shape. The parts of a text do not depend on how
the text is cut into pieces, except that neighbouring parts of one kind may arrive joined.
"""

from __future__ import annotations

import msgspec

SHARE_LOOKED_AT = 64
"""New text waits until it is this fraction of the text that a parser holds, because each look reads what is held."""


class Words(msgspec.Struct, frozen=True):
    """A piece of the answer itself. `start`: the characters of the whole text before it, marks and reasoning included."""

    text: str
    start: int = 0


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the model thinks before it answers."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a tool. `index` counts the answer's calls from 0; `id` is the model's own, "" where it writes none."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. The pieces of a call join to the text of one JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The arguments of a call are complete."""

    index: int


Part = Words | Reasoning | CallBegun | CallArguments | CallEnded
