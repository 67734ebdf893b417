"""Literals: a value in a model's own spelling, passed on piece by piece as JSON.

Python's spelling has quotes of both kinds, escapes, True, None, tuples and trailing commas; Gemma's has bare keys and texts
between marks that nothing escapes. Both may contain plain JSON. Depth costs no stack.
"""

from __future__ import annotations

import json
import math
import re

import msgspec

from vnext.text.dialects.json_text import Take
from vnext.text.dialects.reader import NoCall, Reader, Reading

KEY_SIZE_MAX = 256
_SCALAR = re.compile(r"[-+.\w]*")
_SCALAR_SIZE_MAX = 4_096
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?(?:0[xob][0-9a-fA-F_]+|[0-9_]+)")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(
    r"\\(?:(?P<kept>u[0-9a-fA-F]{4})|x(?P<byte>[0-9a-fA-F]{2})|U(?P<wide>[0-9a-fA-F]{8})"
    r"|(?P<octal>[0-7]{1,3})|(?P<one>[^xuUN0-7]))",
    re.DOTALL,
)
_ESCAPE_SIZE_MAX = 10
_ONE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ONE |= {"\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_AS_JSON = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}


class Spelling(msgspec.Struct, frozen=True):
    """`quotes` begin and end texts; those of more than one character know no escapes. `bare_keys`: keys need no quotes."""

    quotes: tuple[str, ...]
    bare_keys: bool = False


PYTHON = Spelling(('"', "'"))


def literal(reader: Reader, take: Take, spelling: Spelling) -> Reading[None]:
    """One value; `take` gets its JSON. Raises NoCall where it is none."""
    open_: list[str] = []
    while True:
        yield from reader.skip()
        mark = yield from reader.take(*_BRACKETS)
        if mark is None:
            yield from _plain(reader, take, spelling)
        else:
            open_.append(mark)
            take(_AS_JSON[mark])
        yield from _close(reader, take, open_, is_new=mark is not None)
        if not open_:
            return
        if open_[-1] == "{":
            yield from _key(reader, take, spelling)


def _close(reader: Reader, take: Take, open_: list[str], *, is_new: bool) -> Reading[None]:
    """Read the brackets that close here, up to the next element."""
    while open_:
        yield from reader.skip()
        has_comma = False if is_new else (yield from reader.take(",")) is not None
        yield from reader.skip()
        if (yield from reader.take(_BRACKETS[open_[-1]])):
            take(_AS_JSON[_BRACKETS[open_.pop()]])
            is_new = False
        elif has_comma:
            take(", ")
            return
        elif is_new:
            return
        else:
            raise NoCall


def _key(reader: Reader, take: Take, spelling: Spelling) -> Reading[None]:
    yield from reader.skip()
    if (quote := (yield from reader.take(*spelling.quotes))) is not None:
        yield from _text(reader, take, quote)
        yield from reader.skip()
        yield from reader.expect(":")
    elif spelling.bare_keys:
        take(json.dumps((yield from bare_key(reader, ":")), ensure_ascii=False))
    else:
        raise NoCall
    take(": ")


def bare_key(reader: Reader, mark: str) -> Reading[str]:
    """A key without quotes, up to and over the mark. Raises NoCall."""
    key = (yield from reader.until(mark, size_max=KEY_SIZE_MAX)).strip()
    if not key or any(character in key for character in "<>{}[]()\"',:= \n"):
        raise NoCall
    return key


def _plain(reader: Reader, take: Take, spelling: Spelling) -> Reading[None]:
    """A text, a number or a constant."""
    if (quote := (yield from reader.take(*spelling.quotes))) is not None:
        yield from _text(reader, take, quote)
        return
    while True:
        found = _SCALAR.match(reader.text, reader.place)
        assert found is not None
        if found.end() < len(reader.text) or reader.ended or len(found[0]) > _SCALAR_SIZE_MAX:
            break
        yield
    text = _scalar(found[0])
    reader.place = found.end()
    take(text)


def _scalar(text: str) -> str:
    """Its JSON. Raises NoCall."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > _SCALAR_SIZE_MAX:
        raise NoCall
    if _NUMBER.fullmatch(text):
        return text
    try:
        number: int | float = int(text, 0) if _INTEGER.fullmatch(text) else float(text)
    except ValueError as error:
        raise NoCall from error
    if not math.isfinite(number):
        raise NoCall
    return json.dumps(number)


def _text(reader: Reader, take: Take, quote: str) -> Reading[None]:
    """A text up to and over its quote."""
    take('"')
    plain = re.compile("[^<\\\\]+" if len(quote) > 1 else f"[^{quote}\\\\]+")
    while True:
        if not (yield from reader.more()):
            raise NoCall
        if found := plain.match(reader.text, reader.place):
            reader.place = found.end()
            take(_inner(found[0]))
        elif (yield from reader.take(quote)):
            take('"')
            return
        elif len(quote) == 1:
            yield from _escape(reader, take)
        else:
            reader.place += 1
            take(_inner(reader.text[reader.place - 1]))


def _escape(reader: Reader, take: Take) -> Reading[None]:
    while not (found := _ESCAPE.match(reader.text, reader.place)) or (
        found["octal"] and found.end() == len(reader.text) and not reader.ended
    ):
        if reader.ended or len(reader.text) - reader.place >= _ESCAPE_SIZE_MAX:
            raise NoCall
        yield
    if found["kept"]:
        text = found[0]
    elif found["one"]:
        text = _inner(_ONE.get(found["one"], found[0]))
    else:
        code = int(found["octal"], 8) if found["octal"] else int(found["byte"] or found["wide"], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise NoCall
        text = _inner(chr(code))
    reader.place = found.end()
    take(text)


def _inner(text: str) -> str:
    """A text as it stands in JSON between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
