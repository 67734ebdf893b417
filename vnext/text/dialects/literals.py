"""Literals: a value in a model's own spelling, passed on piece by piece as JSON.

Python's spelling has quotes of both kinds, escapes, True, None, tuples and trailing commas; Gemma's has bare keys and texts
between marks that nothing escapes. Both may contain plain JSON. Depth costs no stack.
"""

from __future__ import annotations

import json
import re

import msgspec

from vnext.text.dialects.reader import NoCall, Reader, Reading, Take

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
    """`quotes` begin and end texts; those that are marks know no escapes. `bare_keys`: keys need no quotes."""

    quotes: tuple[str, ...]
    bare_keys: bool = False


PYTHON = Spelling(('"""', "'''", '"', "'"))


def literal(reader: Reader, take: Take, spelling: Spelling) -> Reading[None]:
    """One value; `take` gets its JSON. Raises NoCall where it is none."""
    open_: list[str] = []
    made = _Brackets(take)
    while True:
        yield from reader.skip()
        mark = yield from reader.take(*_BRACKETS)
        if mark is None:
            yield from _plain(reader, made.take, spelling)
        else:
            open_.append(mark)
            made.open(mark)
        yield from _close(reader, made, open_, is_new=mark is not None)
        if not open_:
            return
        if open_[-1] == "{":
            yield from _key(reader, made.take, spelling)


class _Brackets:
    """The JSON of brackets. A parenthesis is a list if it is empty or a comma follows its first element, and else only holds a
    value together, so that element waits."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiting: list[str] = []
        self._places: list[int] = []  # of each open bracket: its place in `waiting`, -1 where it is decided
        self._undecided_count = 0

    def take(self, text: str) -> None:
        """JSON within the brackets."""
        if self._undecided_count:
            self._waiting.append(text)
        else:
            self._take(text)

    def open(self, mark: str) -> None:
        if mark != "(":
            self._places.append(-1)
            self.take(_AS_JSON[mark])
            return
        self._places.append(len(self._waiting))
        self._undecided_count += 1
        self.take("")

    def list(self) -> None:
        """The innermost bracket is none that only holds a value together."""
        if (place := self._places[-1]) >= 0:
            self._waiting[place], self._places[-1] = "[", -1
            self._decide()

    def close(self, mark: str) -> None:
        if self._places.pop() < 0:
            self.take(_AS_JSON[mark])
        else:
            self._decide()

    def _decide(self) -> None:
        self._undecided_count -= 1
        if not self._undecided_count:
            self._take("".join(self._waiting))
            self._waiting = []


def _close(reader: Reader, made: _Brackets, open_: list[str], *, is_new: bool) -> Reading[None]:
    """Read the brackets that close here, up to the next element."""
    while open_:
        yield from reader.skip()
        has_comma = False if is_new else (yield from reader.take(",")) is not None
        yield from reader.skip()
        if (yield from reader.take(_BRACKETS[open_[-1]])):
            if is_new or has_comma:
                made.list()
            made.close(_BRACKETS[open_.pop()])
            is_new = False
        elif has_comma:
            made.list()
            made.take(", ")
            return
        elif is_new:
            return
        else:
            raise NoCall


def _key(reader: Reader, take: Take, spelling: Spelling) -> Reading[None]:
    yield from reader.skip()
    if (quote := (yield from reader.take(*spelling.quotes))) is not None:
        yield from _texts(reader, take, spelling, quote)
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
    if (quote := (yield from reader.take(*spelling.quotes))) is not None:
        yield from _texts(reader, take, spelling, quote)
        return
    yield from scalar(reader, take)


def scalar(reader: Reader, take: Take) -> Reading[None]:
    """A number or a constant, in Python's spelling or in JSON's; `take` gets its JSON. Raises NoCall."""
    written = yield from reader.run(_SCALAR, _SCALAR_SIZE_MAX)
    text = _scalar(written)
    reader.place += len(written)
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
        return json.dumps(number, allow_nan=False)
    except (ValueError, OverflowError) as error:
        raise NoCall from error


def _texts(reader: Reader, take: Take, spelling: Spelling, quote: str) -> Reading[None]:
    """A text, or in Python several that stand side by side and are one; the first quote has been read."""
    found: str | None = quote
    take('"')
    while found is not None:
        yield from text_until(reader, take, found)
        if spelling is not PYTHON:
            break
        offset = reader.place - reader.begin
        yield from reader.skip()
        if (found := (yield from reader.take(*spelling.quotes))) is None:
            reader.place = reader.begin + offset
    take('"')


def text_until(reader: Reader, take: Take, quote: str) -> Reading[None]:
    """A text up to and over its quote, in Python's spelling; `take` gets its JSON, without quotes. Raises NoCall."""
    plain = re.compile(rf"[^{quote[0]}\\\\]+")
    while True:
        if not (yield from reader.more()):
            raise NoCall
        if found := plain.match(reader.text, reader.place):
            reader.place = found.end()
            take(_inner(found[0]))
        elif (yield from reader.take(quote)):
            return
        elif reader.text[reader.place] == "\\" and quote[0] in "'\"":
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
