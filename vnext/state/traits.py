"""Traits: what the fields of an event are, who leaves by it, and how people read it, as data.

Events carry their traits (events.py). Code that treats many events alike reads them in place of a list of cases: the log's width of
tokens, redaction, timelines, the page, shrinking, tests. Free of numpy and of the log.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import ClassVar, Literal, Protocol

import msgspec

TOKEN_BYTES, HASH_BYTES = 4, 16


class Leave(msgspec.Struct, frozen=True):
    """Which running requests leave the batch by an event, before it is folded: "rows" are in its field `field`, "requests" have
    the ids in it, and "everyone" leaves where the field has `value` (always without a field). With "back" all stay, and
    go back behind the steps in flight."""

    who: Literal["nobody", "back", "rows", "requests", "everyone"]
    field: str = ""
    value: str = ""


NOBODY = Leave("nobody")


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one type of event, by the names of its fields.

    `tokens` are int32 bytes, in order of position, and `hashes` 16 bytes each. Of texts and other bytes, `keyed` may say
    something of a client and stand in a redacted log under its key, `private` are empty there, of the folders in `folders` only the
    last name remains, and `public` stay. Every field of bytes or text is in one of these.
    `requests` hold an id or several. `transfer`: the event begins or ends the transfer in its field of that name, or loses all.
    `shrinks`: fields that a smaller story may have at their defaults. `marks`: in whose lane a timeline shows the event.
    `lines` are for people, the first in which all fields beyond those of the last have a value: see `line_of`.
    """

    lines: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    keyed: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    leave: Leave = NOBODY
    transfer: Literal["", "begins", "ends", "loses"] = ""
    shrinks: tuple[str, ...] = ()
    marks: Literal["", "engine", "request"] = ""


class Event(Protocol):
    """What events.py declares."""

    traits: ClassVar[Traits]


def line_of(event: Event) -> str:
    """The event in a line for people: numbers of tokens and blocks, names and causes, but no token and no prompt."""
    *lines, plain = event.traits.lines
    line = next((line for line in lines if all(getattr(event, field) for field in _fields(line) - _fields(plain))), plain)
    return line.format(**{field: _shown(event, field) for field in _fields(line)})


@cache
def _fields(line: str) -> frozenset[str]:
    return frozenset(part.split("}")[0] for part in line.split("{")[1:])


def _shown(event: Event, field: str) -> object:
    value, traits = getattr(event, field), event.traits
    if field in traits.tokens:
        return len(value) // TOKEN_BYTES
    if field in traits.hashes:
        return len(value) // HASH_BYTES
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def everyone_leaves(event: Event) -> bool:
    """Whether all running requests wait again behind this event, whose tokens are computed anew."""
    leave = event.traits.leave
    return leave.who == "everyone" and (not leave.field or getattr(event, leave.field) == leave.value)


def loses_steps(event: Event) -> bool:
    """Whether the steps in flight are over behind this event, without tokens."""
    return event.traits.leave.who == "back" or everyone_leaves(event)


def leaving(event: Event, ids: Collection[int]) -> Sequence[int]:
    """The rows of the running requests `ids` (one of each row) that the event itself takes from the batch; a commit's ends are
    found by folding it. Not checked: of an illegal event they may be no rows."""
    leave = event.traits.leave
    if leave.who in ("nobody", "back"):
        return ()
    if leave.who == "everyone":
        return range(len(ids)) if everyone_leaves(event) else ()
    named: Sequence[int] = getattr(event, leave.field)
    if leave.who == "rows" or not named:
        return named
    gone = set(named)
    return [row for row, id_ in enumerate(ids) if id_ in gone]


def requests_of(event: Event) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    for field in event.traits.requests:
        value = getattr(event, field)
        found += value if isinstance(value, tuple) else (value,)
    return found


def transfer_of(event: Event) -> int:
    """The number of the transfer that an event begins or ends, -1 for none."""
    return getattr(event, "transfer", -1)
