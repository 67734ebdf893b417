"""JSON as a model writes it: one value read piece by piece, and calls that are JSON objects.

A value's text is passed on while it is read, so a call's arguments stream. What models write and JSON forbids is passed on as
JSON where its meaning is clear: control characters and other escapes inside a string, Python's strings, constants and numbers, a
comma after the last element. Depth costs no stack.
"""

from __future__ import annotations

import json
import re

import msgspec

from vnext.text.dialects.literals import scalar, text_until
from vnext.text.dialects.reader import NoCall, Reader, Reading, Take, whole

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_CONTROLS = {place: json.dumps(chr(place))[1:-1] for place in range(32)}
_SEPARATORS = re.compile(r"[\s;]*")
_STRAY = re.compile(r"[\s}\]]*")
_CLOSES = {"{": "}", "[": "]"}


def value(reader: Reader, take: Take) -> Reading[None]:
    """One JSON value, without space around it; `take` gets its pieces. Raises NoCall where it is none."""
    open_: list[str] = []
    while True:
        done = yield from _begin_value(reader, take, open_)
        while done and open_:
            yield from _space(reader, take)
            if (yield from _comma(reader, take, _CLOSES[open_[-1]])):
                if open_[-1] == "{":
                    yield from _key(reader, take)
                break
            yield from _one_of(reader, take, _CLOSES[open_[-1]])
            open_.pop()
        if not open_:
            return


def _comma(reader: Reader, take: Take, close: str) -> Reading[bool]:
    """A comma, with the space after it. Returns whether an element follows it; the comma is dropped where none does."""
    if not (yield from reader.next_is(",")):
        return False
    offset = reader.place - reader.begin
    reader.place += 1
    yield from reader.skip(_SPACE)
    is_last = yield from reader.next_is(close)
    take(reader.text[reader.begin + offset + is_last : reader.place])
    return not is_last


def _begin_value(reader: Reader, take: Take, open_: list[str]) -> Reading[bool]:
    """A scalar, or the beginning of a list or an object. Returns whether a value ends here."""
    if not (yield from reader.more()):
        raise NoCall
    match reader.text[reader.place]:
        case '"' | "'":
            yield from _string(reader, take)
            return True
        case "{" | "[" as mark:
            open_.append(mark)
            _pass(reader, take, 1)
            yield from _space(reader, take)
            if (yield from reader.next_is(_CLOSES[mark])):
                _pass(reader, take, 1)
                open_.pop()
                return True
            if mark == "{":
                yield from _key(reader, take)
            return False
        case _:
            yield from scalar(reader, take)
            return True


def _key(reader: Reader, take: Take) -> Reading[None]:
    yield from _string(reader, take)
    yield from _space(reader, take)
    yield from _one_of(reader, take, ":")
    yield from _space(reader, take)


def _string(reader: Reader, take: Take) -> Reading[None]:
    if (yield from reader.take("'")):
        take('"')
        yield from text_until(reader, take, "'")
        take('"')
        return
    yield from _one_of(reader, take, '"')
    while True:
        if not (yield from reader.more()):
            raise NoCall
        match reader.text[reader.place]:
            case '"':
                _pass(reader, take, 1)
                return
            case "\\":
                yield from _escape(reader, take)
            case _:
                found = _STRING.match(reader.text, reader.place)
                assert found is not None
                reader.place = found.end()
                take(found[0].translate(_CONTROLS))


def _escape(reader: Reader, take: Take) -> Reading[None]:
    """What follows a backslash. One that begins no escape of JSON's is meant as it stands, except before a quote."""
    while not (found := _ESCAPE.match(reader.text, reader.place)):
        rest = reader.text[reader.place : reader.place + 6]
        if reader.ended and _BEGUN_ESCAPE.fullmatch(rest):
            reader.starve()
            raise NoCall
        if not _BEGUN_ESCAPE.fullmatch(rest):
            reader.place += 1
            take("" if rest[1] == "'" else r"\\")
            return
        yield
    _pass(reader, take, len(found[0]))


def _space(reader: Reader, take: Take) -> Reading[None]:
    while (yield from reader.more()):
        found = _SPACE.match(reader.text, reader.place)
        assert found is not None
        if not found[0]:
            return
        _pass(reader, take, len(found[0]))


def _one_of(reader: Reader, take: Take, marks: str) -> Reading[str]:
    if not (yield from reader.more()) or reader.text[reader.place] not in marks:
        raise NoCall
    mark = reader.text[reader.place]
    _pass(reader, take, 1)
    return mark


def _pass(reader: Reader, take: Take, size: int) -> None:
    reader.place += size
    take(reader.text[reader.place - size : reader.place])


def stray(reader: Reader, close: str) -> Reading[None]:
    """Read over brackets that close nothing, where the mark `close` follows them."""
    offset = reader.place - reader.begin
    yield from reader.skip(_STRAY)
    if not (yield from reader.next_is(close)):
        reader.place = reader.begin + offset


def calls(reader: Reader, names: frozenset[str] | None) -> Reading[None]:
    """One call as a JSON object, a list of them, or several with semicolons or nothing in between. Raises NoCall.

    `names`: only these are calls.
    """
    while True:
        yield from reader.skip(_SEPARATORS)
        if (yield from reader.take("[")):
            yield from reader.skip()
            while True:
                yield from call(reader, names)
                yield from reader.skip()
                has_comma = (yield from reader.expect(",", "]")) == ","
                yield from reader.skip()
                if not has_comma or (yield from reader.take("]")):
                    break
            reader.drop()
        else:
            yield from call(reader, names)
        yield from reader.skip(_SEPARATORS)
        if not ((yield from reader.next_is("{")) or (yield from reader.next_is("["))):
            return


def call(reader: Reader, names: frozenset[str] | None) -> Reading[None]:
    """{"name": ..., "arguments": {...}}, in any order; Llama says "parameters". Once the name is known, arguments stream, and once
    they are complete, the call is.

    Some models encode the arguments once more as text. Raises NoCall.
    """
    found = _Call()
    yield from reader.expect("{")
    yield from _members(reader, names, found)
    if not found.name:
        raise NoCall
    if not found.has_begun:
        reader.begin_call(found.name, found.id)
        reader.arguments(found.arguments or "{}")
    reader.end_call()


def _members(reader: Reader, names: frozenset[str] | None, found: _Call) -> Reading[None]:
    """The members of a call, up to and over its bracket, which may be missing behind the arguments. Raises NoCall."""
    yield from reader.skip()
    while not (yield from reader.take("}")):
        key: list[str] = []
        yield from _string(reader, key.append)
        yield from reader.skip()
        yield from reader.expect(":")
        yield from reader.skip()
        yield from _member(reader, names, found, json.loads("".join(key)))
        yield from reader.skip()
        if not (yield from reader.take(",")):
            if not (yield from reader.take("}")) and not (found.name and (found.has_begun or found.arguments)):
                raise NoCall
            return
        yield from reader.skip()


class _Call(msgspec.Struct):
    """The members read so far. `arguments` waits for the name; `has_begun`: they stream."""

    name: str = ""
    id: str = ""
    arguments: str = ""
    has_begun: bool = False


def _member(reader: Reader, names: frozenset[str] | None, found: _Call, key: str) -> Reading[None]:
    """The value of a call's member `key`. Raises NoCall."""
    pieces: list[str] = []
    match key:
        case "name":
            yield from _string(reader, pieces.append)
            found.name = json.loads("".join(pieces))
            if not found.name or (names is not None and found.name not in names):
                raise NoCall
        case "id":
            yield from value(reader, pieces.append)
            found.id = "".join(pieces).strip('"')
        case "arguments" | "parameters" if not (found.arguments or found.has_begun):
            if found.name and (yield from reader.next_is("{")):
                found.has_begun = True
                reader.begin_call(found.name, found.id)
                yield from value(reader, reader.arguments)
            else:
                yield from value(reader, pieces.append)
                found.arguments = _object("".join(pieces))
        case _:
            yield from value(reader, pieces.append)


def _object(text: str) -> str:
    """The text of an object, which may be encoded as a string. Raises NoCall."""
    if text.startswith('"'):
        text = whole(json.loads(text).strip() or "{}", value) or ""
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise NoCall
    return text
