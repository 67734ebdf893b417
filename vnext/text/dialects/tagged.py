"""Calls whose arguments stand one by one between tags: Qwen 3 Coder and GLM 4.5.

    qwen3_coder  <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>
    glm45        <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>

A value is JSON or text, as the function's schema wants it (`wanted`), and passes on as a member of a JSON object once it is
complete: at a closing tag with which the call goes on or ends, so that a value may hold such a tag; where a model forgot it, at
the tag of another known argument or at the call's end. Both read Hermes' objects too, which forced calls use where the arguments
of a function cannot be distinguished (grammar.py), or where a text has a bound that no grammar of free text keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vnext.text.dialects.dialect import Dialect, Tools
from vnext.text.dialects.grammar import Frame, Functions, Spell, json_rule, properties_of, quoted, schema_of, start
from vnext.text.dialects.literals import PYTHON, literal
from vnext.text.dialects.named import NAME_SIZE_MAX
from vnext.text.dialects.objects import HERMES, json_head
from vnext.text.dialects.reader import NoCall, Reader, Reading, whole

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ENDS = (_CLOSE, _OPEN, "<function=")
_TEXT_KEYWORDS = {"type", "title", "description", "default", "examples", "enum", "const", "$defs", "definitions"}


class _Tags(NamedTuple):
    """The tags of an argument: before its key, between this and the value, after the value; and after the arguments of a call."""

    key: str
    value: str
    close: str
    end: str


_QWEN = _Tags("<parameter=", ">", "</parameter>", "</function>")
_GLM = _Tags("<arg_key>", "</arg_key>", "</arg_value>", _CLOSE)


def _read_qwen(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    if opened == _OPEN:
        yield from reader.skip()
        if (yield from reader.next_is("{")) or (yield from reader.next_is("[")):
            yield from HERMES.read(reader, opened, tools)
            return
        yield from reader.expect("<function=")
    name = (yield from reader.until(">", size_max=NAME_SIZE_MAX)).strip()
    arguments = _Arguments(reader, name, tools)
    yield from _members_of(reader, arguments, _QWEN)
    is_closed = yield from reader.close(_QWEN.end, besides=_QWEN.key)
    yield from _end(reader, arguments, is_closed)


def _read_glm(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    yield from reader.skip()
    if (yield from reader.next_is("{")) or (yield from reader.next_is("[")):
        yield from HERMES.read(reader, opened, tools)
        return
    name = (yield from reader.until("<", size_max=NAME_SIZE_MAX)).strip()
    reader.place -= 1
    arguments = _Arguments(reader, name, tools)
    yield from _members_of(reader, arguments, _GLM)
    yield from _end(reader, arguments, False)


def _members_of(reader: Reader, arguments: _Arguments, tags: _Tags) -> Reading[None]:
    while True:
        yield from reader.skip()
        if not (yield from reader.take(tags.key)):
            return
        key = (yield from reader.until(tags.value, size_max=NAME_SIZE_MAX)).strip()
        if tags is _GLM:
            yield from reader.skip()
            yield from reader.expect("<arg_value>")
        arguments.begin()
        value = yield from _value(reader, arguments, tags, key)
        arguments.add(key, value.removeprefix("\n").removesuffix("\n") if tags is _QWEN else value)


def _value(reader: Reader, arguments: _Arguments, tags: _Tags, key: str) -> Reading[str]:
    """The text of the value of `key`, up to its end and over its closing tag. Raises NoCall."""
    found: list[str] = []
    while True:
        text, mark = yield from reader.until_one(tags.close, tags.key, tags.end, _CLOSE)
        found.append(text)
        if mark == tags.close:
            is_end = yield from reader.ends_with(tags.key, tags.end, *_ENDS)
        elif mark == tags.key:
            following = yield from _key(reader, tags)
            is_end = text.endswith("\n") and following != key and arguments.wants(following)
        elif mark == _CLOSE:
            is_end = yield from reader.ends_with(_OPEN)
        else:
            is_end = yield from reader.ends_with(*_ENDS)
        if is_end:
            reader.place -= len(mark) if mark != tags.close else 0
            return "".join(found)
        found.append(mark)


def _key(reader: Reader, tags: _Tags) -> Reading[str]:
    """The key that follows, "" where none does; reads nothing."""
    offset = reader.place - reader.begin
    try:
        key = yield from reader.until(tags.value, size_max=NAME_SIZE_MAX)
    except NoCall:
        key = ""
    reader.place = reader.begin + offset
    return key.strip()


def _end(reader: Reader, arguments: _Arguments, is_closed: bool) -> Reading[None]:
    """The end of a call. A model may forget the closing marks only where its answer ends, or another call begins, and the call has
    arguments; `is_closed`: one has been read."""
    yield from reader.skip()
    is_end = (yield from reader.close(_CLOSE, besides=_QWEN.key)) or is_closed
    if not is_end and arguments.keys:
        is_end = (
            not (yield from reader.more()) or (yield from reader.next_is(_OPEN)) or (yield from reader.next_is("<function="))
        )
    if not is_end:
        raise NoCall
    arguments.end()


class _Arguments:
    """The arguments of one call, as the members of a JSON object; `keys` are those so far."""

    def __init__(self, reader: Reader, name: str, tools: Tools) -> None:
        if not name or any(character in name for character in "<>{}\n"):
            raise NoCall
        functions = (tool["function"] for tool in tools)
        self._schema = next((schema_of(function) for function in functions if function["name"] == name), {})
        self._properties = found if isinstance(found := self._schema.get("properties"), Mapping) else {}
        self._reader = reader
        self._name = name
        self._has_begun = False
        self.keys: set[str] = set()

    def begin(self) -> None:
        if not self._has_begun:
            self._reader.begin_call(self._name)
            self._has_begun = True

    def wants(self, key: str) -> bool:
        """Whether the function has an argument of this name that the call does not have yet."""
        return key in self._properties and key not in self.keys

    def add(self, key: str, text: str) -> None:
        """Another argument; of two with one name the first counts."""
        if key in self.keys:
            self._reader.drop()
            return
        begin = ", " if self.keys else "{"
        self.keys.add(key)
        value = json_of(text, self._properties.get(key), self._schema)
        self._reader.arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: {value}")

    def end(self) -> None:
        self.begin()
        self._reader.arguments("}" if self.keys else "{}")
        self._reader.end_call()


# ---- forced calls ------------------------------------------------------------------------------------------------


def _grammar(functions: Functions, parallel: bool, spell: Spell, marks: tuple[str, str, str], head: str, tail: str) -> str:
    """`marks`: before a key, between it and its value, after the value."""
    rules = []
    for place, function in enumerate(functions):
        members = _members(function, spell, marks, f"call_{place}")
        if members is None:
            opened, closed = spell(f"{_OPEN}\n{json_head(function['name'])}"), spell(f"}}\n{_CLOSE}")
            rules += [f"call_{place}: {opened} arguments_{place} {closed}"]
            rules += [f"arguments_{place}: {json_rule(schema_of(function))}"]
        else:
            calls = " ".join(f"{name}?" if optional else name for name, _, optional in members)
            rules += [f"call_{place}: {spell(head.format(function['name']))} {calls} {spell(tail)}"]
            rules += [body for _, body, _ in members]
    return "\n".join([start(len(functions), parallel, spell, Frame(head=str, between="\n")), *rules]) + "\n"


def _members(
    function: Mapping[str, Any], spell: Spell, marks: tuple[str, str, str], call: str
) -> list[tuple[str, str, bool]] | None:
    """(rule, its body, whether it may be left out) of each argument; None where they must be written as JSON."""
    properties = properties_of(function)
    if properties is None or any(set("<>{}\n") & set(name) or name != name.strip() for name in [function["name"], *properties]):
        return None
    found = []
    for place, (name, (schema, required)) in enumerate(properties.items()):
        value = _value_rule(schema, f"{call}_value_{place}", spell, marks[2])
        if value is None:
            return None
        body = f"{call}_{place}: {spell(marks[0] + name + marks[1])} {call}_value_{place}\n{value}"
        found.append((f"{call}_{place}", body, not required))
    return found


def _value_rule(schema: Mapping[str, Any], rule: str, spell: Spell, close: str) -> str | None:
    """The rule of a value and the mark after it; None where free text cannot keep the schema."""
    if schema.get("type") != "string":
        simple = {"integer", "number", "boolean", "array", "object", "null"}
        if schema.get("type") not in simple or "anyOf" in schema or "$ref" in schema:
            return None
        return f"{rule}: {rule}_json {spell(close)}\n{rule}_json: {json_rule(schema)}"
    if set(schema) - _TEXT_KEYWORDS:
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None:
        if not all(isinstance(each, str) and each.strip("\n") == each and "<" not in each for each in listed) or not all(
            listed
        ):
            return None
        return f"{rule}: ({' | '.join(map(quoted, listed))}) {spell(close)}"
    mark, after = close.strip(), quoted(close[len(close.rstrip()) :])
    if spell(mark) != quoted(mark):  # a mark with special tokens: the text has no closing tag at all
        return f"{rule}: {rule}_text {spell(close)}\n{rule}_text: /([^<]|<[^\\/])*/"
    return f"{rule}: {rule}_text {after}\n{rule}_text[suffix={quoted(mark)}]: /(?s:.*)/"


def _qwen_grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    marks = ("<parameter=", ">\n", "\n</parameter>\n")
    return _grammar(functions, parallel, spell, marks, f"{_OPEN}\n<function={{}}>\n", f"</function>\n{_CLOSE}")


def _glm_grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    marks = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
    return _grammar(functions, parallel, spell, marks, f"{_OPEN}{{}}\n", _CLOSE)


QWEN3_CODER = Dialect(name="qwen3_coder", opens=(_OPEN, "<function="), read=_read_qwen, grammar=_qwen_grammar)
GLM45 = Dialect(name="glm45", opens=(_OPEN,), read=_read_glm, grammar=_glm_grammar)


# ---- an argument written as bare text ----------------------------------------------------------------------------
# Wanted: the JSON of an argument that a model wrote as bare text, by the kinds of value that its schema wants.
#
# It is read as JSON, and as Python where that fails and the schema wants what it then says. What is neither, or of a kind that
# the schema does not want where it also wants texts, is a text.


_DEPTH_MAX = 20
_CONSTANTS = ("True", "False", "None")
_BY_KIND = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def json_of(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of an argument. `schema` is its own, `root` the function's, in which references lead to others."""
    kinds = frozenset(_kinds(schema, root, 0, set()))
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    found = _kind(written)
    if found and (not kinds or _fits(found, kinds) or "string" not in kinds):
        return written
    made = whole(written, lambda reader, take: literal(reader, take, PYTHON)) if kinds or written in _CONSTANTS else None
    if made is not None and (not kinds or _fits(_kind(made), kinds - {"string"})):
        return made
    lowered = written.lower()  # TRUE and NULL
    if (found := _kind(lowered)) in ("boolean", "null") and (not kinds or found in kinds):
        return lowered
    return json.dumps(text, ensure_ascii=False)


def _kind(text: str) -> str:
    """The kind of a JSON text, "" where it is none."""
    try:
        return _BY_KIND[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return ""


def _refuse(name: str) -> None:
    raise ValueError(name)


def _fits(kind: str, kinds: frozenset[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int, seen: set[str]) -> Iterator[str]:
    """The kinds of value that a schema wants, as JSON Schema names them; none where it says nothing about them. `seen`: the
    references that were followed, each once."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return
    named = schema.get("type")
    if named is not None:
        yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        return
    for value in [schema["const"]] if "const" in schema else _listed(schema, "enum"):
        yield _BY_KIND.get(type(value), "")
    for name in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema, name):
            yield from _kinds(each, root, depth + 1, seen)
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        yield from _kinds(_target(reference, root), root, depth + 1, seen)


def _listed(schema: Mapping[str, object], name: str) -> list[object]:
    return found if isinstance(found := schema.get(name), list) else []


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the function's schema leads to; None where that is nothing."""
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target
