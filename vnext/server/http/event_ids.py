"""Event ids: what the `id:` of an event says, so that any server can go on behind it. Pure.

    id: 3f9c0a.AGd-XQk.17          REQUEST.POSITION

REQUEST is the answer's id without its kind, a dot, and `Origin`'s numbers in base64. POSITION has a part for each choice:

    17          its first 17 tokens have been taken, and all that they show has been sent
    17e         it has ended behind them
    17+3*2      of what the next 3 tokens show, 2 events have been sent; 17+3e*2 where it ends with them

and behind the choices, `/1` or `/2`: so many of the events that follow the last choice's end. A position counts tokens, not
events: how many tokens an event shows depends on how fast its client reads.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest

HEADER = "Last-Event-ID"
CHOICES_MAX = 64
"""Of a stream whose events have ids, which say a number for each."""
CHARACTERS_MAX = 2048
_WIDTHS = {"created_s": 5, "seed": 8, "cached_tokens": 3, "fingerprint": 5, "digest": 8}
_PACKED = sum(_WIDTHS.values())
_ANSWER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:/+=@-]{0,160}")
_CHOICE = re.compile(r"(\d{1,9})(?:(e)|\+(\d{1,9})(e?)\*(\d{1,6}))?")
_POSITION = re.compile(r"([^/]*)(?:/([12]))?")
_FIRST = re.compile(rb"^id: (.+)\.([^.\n]+)$", re.MULTILINE)


class Origin(msgspec.Struct, frozen=True):
    """What a stream began with. `answer`: its id without the kind. `seed`: of its first choice. `cached_tokens`: of its prompt, as
    its usage says. `fingerprint`: of what computes it. `digest`: of what it was asked for."""

    answer: str
    created_s: int
    seed: int
    cached_tokens: int
    fingerprint: int
    digest: int

    def written(self) -> str:
        """As REQUEST in an event's id."""
        data = b"".join(getattr(self, name).to_bytes(width, "big") for name, width in _WIDTHS.items())
        return f"{self.answer}.{urlsafe_b64encode(data).rstrip(b'=').decode()}"

    @property
    def system_fingerprint(self) -> str:
        """As answers show it."""
        return f"fp_{self.fingerprint:010x}"


class Reached(NamedTuple):
    """How far a client has one choice: `tokens`, and `events` of what the next `more` tokens show, behind which it `ends`."""

    tokens: int
    has_ended: bool = False
    more: int = 0
    ends: bool = False
    events: int = 0

    @property
    def is_begin(self) -> bool:
        return self == Reached(0)


class LastEvent(NamedTuple):
    """The id of the last event that a client has."""

    origin: Origin
    choices: tuple[Reached, ...]
    written: tuple[str, ...]
    closing: int

    @property
    def all_ended(self) -> bool:
        return all(choice.has_ended for choice in self.choices)


def last_event(headers: Mapping[str, str]) -> LastEvent | None:
    """The id that a client sends, None where it sends none. Raises InvalidRequest."""
    given = headers.get(HEADER, "")
    if not given:
        return None
    if (found := _parsed(given)) is None:
        sentence = f"{HEADER} is {given[:60]!r}, which is no id of this server's events: leave the header out to begin anew."
        raise InvalidRequest(sentence, HEADER)
    return found


def origin_in(headers: Mapping[str, str]) -> str:
    """The fingerprint of the system that began the stream with which a client goes on, "" where that is not known."""
    found = _parsed(headers.get(HEADER, ""))
    return found.origin.system_fingerprint if found else ""


def begin_of(events: bytes) -> str:
    """The id in front of the first event of the stream that begins with `events`; "" where they have none."""
    found = _FIRST.search(events)
    return "" if found is None else f"{found[1].decode()}.{','.join('0' * (found[2].count(b',') + 1))}"


def _parsed(given: str) -> LastEvent | None:
    answer, _, rest = given.rpartition(".")
    answer, _, packed = answer.rpartition(".")
    position = _POSITION.fullmatch(rest)
    if len(given) > CHARACTERS_MAX or position is None or not _ANSWER.fullmatch(answer):
        return None
    written = tuple(position[1].split(","))
    choices = [choice for each in written if (choice := _CHOICE.fullmatch(each))]
    origin = _origin(answer, packed)
    if origin is None or len(choices) < len(written) or not given.isascii() or len(choices) > CHOICES_MAX:
        return None
    found = LastEvent(origin, tuple(map(_reached, choices)), written, int(position[2] or 0))
    return None if found.closing and not found.all_ended else found


def _origin(answer: str, packed: str) -> Origin | None:
    try:
        data = urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
    except ValueError:
        return None
    if len(data) != _PACKED or urlsafe_b64encode(data).rstrip(b"=").decode() != packed:
        return None
    numbers, begin = {}, 0
    for name, width in _WIDTHS.items():
        numbers[name], begin = int.from_bytes(data[begin : begin + width], "big"), begin + width
    return Origin(answer, **numbers)


def _reached(found: re.Match[str]) -> Reached:
    tokens, has_ended, more, ends, events = found.groups()
    return Reached(int(tokens), bool(has_ended), int(more or 0), bool(ends), int(events or 0))


def with_id(event: bytes, id_: bytes) -> bytes:
    return b"id: %b\n%b" % (id_, event)
